"""Finds, proves and remembers the fastest way to run fine-grained distributed kernels on the GPUs at hand.

Importing this package is cheap: everything but problems and configs is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotax import former_names
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.operators import load, problems
from autotax.operators.problems import *  # noqa: F403

if TYPE_CHECKING:
    from autotax.api import compare, refresh, trials, tune, tune_callable
    from autotax.db.lookup import Answer, lookup, save_misses
    from autotax.report.charts import plot
    from autotax.runner.trace import trace

__version__ = "0.1.0"

__all__ = [
    "Answer", "Config", "UsageError", "__version__", "compare", "load", "lookup", "plot", "refresh", "save_misses",
    "trace", "trials", "tune", "tune_callable",
]  # fmt: skip
__all__ += problems.__all__

former_names.install()

_LAZY = dict.fromkeys(("lookup", "Answer", "save_misses"), "autotax.db.lookup")
_LAZY |= dict.fromkeys(("tune", "compare", "refresh", "trials", "tune_callable"), "autotax.api")
_LAZY |= {"trace": "autotax.runner.trace", "plot": "autotax.report.charts"}
_LAZY_MODULES = {"nn", "parallel", "testing", "torch"}


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
