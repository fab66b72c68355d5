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


def prepare(problem: Problem, config: Config, context: Context) -> Operator:
    """The operator of `config`, its workspaces allocated. Collective; call `context.heap.check()` before the first call."""
    if isinstance(problem, AllGatherGemm):
        from autotax.kernels.all_gather_gemm import VARIANTS
    else:
        from autotax.kernels.flash_decode import VARIANTS  # type: ignore[assignment]
    return VARIANTS[config.variant](problem, config, context)  # type: ignore[arg-type]
