"""The conformance suites of operators, heaps, stores and runners, for this project and for its extensions.

`check_operator("name")`, `check_store(url)` and `check_runner(runner, ...)` run a suite and report each failure in one line. The
suite of heaps runs on ranks: `Ranks(2).run(run_check, name)` for each name of `autotax.testing.heap.CHECKS`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotax.testing.operators import Checked, check_operator
    from autotax.testing.runners import check_runner
    from autotax.testing.stores import check_store

__all__ = ["Checked", "check_operator", "check_runner", "check_store"]

_LAZY = {"Checked": "operators", "check_operator": "operators", "check_runner": "runners", "check_store": "stores"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
