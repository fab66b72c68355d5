"""For extensions: `check_operator("name")` checks a declared operator, and `Ranks` runs functions on rank processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotax.runner.ranks import RankFailure, Ranks, run_ranks
    from autotax.testing.operators import Checked, check_operator

__all__ = ["Checked", "RankFailure", "Ranks", "check_operator", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.operators" if name in ("Checked", "check_operator") else "autotax.runner.ranks"
    return getattr(importlib.import_module(module), name)
