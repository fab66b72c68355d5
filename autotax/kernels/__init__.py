"""WHAT RUNS: device primitives, and one folder an operator with one module a variant.

Importing an operator's folder imports Triton, which decides then whether kernels are compiled or interpreted: on CPU ranks
TRITON_INTERPRET=1 must be in the environment before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotax.config import Config
from autotax.problem import AllGatherGemm, Problem

if TYPE_CHECKING:
    from autotax.kernels.context import Context
    from autotax.kernels.operator import Operator


_registered: dict[tuple[str, str], type[Operator]] = {}


def register(op: str, variant: str, operator: type[Operator]) -> None:
    """Adds a variant to an operator in this process; a plugin of the runner calls it on every rank."""
    _registered[op, variant] = operator


def prepare(problem: Problem, config: Config, context: Context) -> Operator:
    """The operator of `config`, its workspaces allocated. Collective; call `context.heap.check()` before the first call."""
    if (problem.op, config.variant) in _registered:
        return _registered[problem.op, config.variant](problem, config, context)
    if isinstance(problem, AllGatherGemm):
        from autotax.kernels.all_gather_gemm import VARIANTS
    else:
        from autotax.kernels.flash_decode import VARIANTS  # type: ignore[assignment]
    return VARIANTS[config.variant](problem, config, context)  # type: ignore[arg-type, abstract]
