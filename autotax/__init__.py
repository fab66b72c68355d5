"""Finds, proves and remembers the fastest way to run fine-grained distributed kernels on the GPUs at hand.

Importing this package is cheap: the look-up and the torch modules are imported when they are first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotax.config import Config
from autotax.errors import UsageError
from autotax.problem import AllGatherGemm, FlashDecode

if TYPE_CHECKING:
    from autotax.db.lookup import Answer, lookup, save_misses

__version__ = "0.1.0"

__all__ = ["AllGatherGemm", "Answer", "Config", "FlashDecode", "UsageError", "__version__", "lookup", "save_misses"]

_LAZY = dict.fromkeys(("lookup", "Answer", "save_misses"), "autotax.db.lookup")
_LAZY_MODULES = {"nn"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _LAZY_MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})
