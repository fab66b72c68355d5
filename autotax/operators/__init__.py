"""WHAT IS COMPUTED: one declaration an operator, and the registry. This is the only place where operators are named.

An operator from outside is declared with the same names: `import autotax.operators as op`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotax.operators.declaration import Operator, Peer, Step, Variant
from autotax.operators.registry import load, loaded, named, of, operators, problem_from_dict
from autotax.problem import Problem, choice, dtype, ranks, size, with_world_size

if TYPE_CHECKING:
    from autotax.config import Config
    from autotax.kernels.context import Context
    from autotax.kernels.kernel import Kernel
    from autotax.operators.draw import Call, Draw
    from autotax.spaces.space import Constraint, VariantSpace

__all__ = [
    "Call", "Config", "Constraint", "Context", "Draw", "Kernel", "Operator", "Peer", "Problem", "Step", "Variant", "VariantSpace",
    "choice", "dtype", "load", "loaded", "named", "of", "operators", "problem_from_dict", "ranks", "size", "with_world_size",
]  # fmt: skip

_LAZY = {
    "Call": "autotax.operators.draw",
    "Config": "autotax.config",
    "Draw": "autotax.operators.draw",
    "Kernel": "autotax.kernels.kernel",
    "Context": "autotax.kernels.context",
    "Constraint": "autotax.spaces.space",
    "VariantSpace": "autotax.spaces.space",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
