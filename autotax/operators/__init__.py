"""Operators: one declaration per operator, and the registry. No other package of autotax names an operator. External operators
are declared with the same functions: `import autotax.operators as op`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotax.core.problem import Problem, choice, dtype, ranks, size, with_world_size
from autotax.operators.declaration import Operator, Peer, Step, Variant
from autotax.operators.registry import load, loaded, named, of, operators, problem_from_dict

if TYPE_CHECKING:
    from autotax.core.config import Config
    from autotax.core.space import Constraint, VariantSpace
    from autotax.kernels.context import Context
    from autotax.kernels.kernel import Kernel
    from autotax.operators.inputs import Call, Draw

__all__ = [
    "Call", "Config", "Constraint", "Context", "Draw", "Kernel", "Operator", "Peer", "Problem", "Step", "Variant", "VariantSpace",
    "choice", "dtype", "load", "loaded", "named", "of", "operators", "problem_from_dict", "ranks", "size", "with_world_size",
]  # fmt: skip

_LAZY = {
    "Call": "autotax.operators.inputs",
    "Config": "autotax.core.config",
    "Draw": "autotax.operators.inputs",
    "Kernel": "autotax.kernels.kernel",
    "Context": "autotax.kernels.context",
    "Constraint": "autotax.core.space",
    "VariantSpace": "autotax.core.space",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
