"""Search space of `pull_reduce`: that of `push`."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces.gemm_reduce_scatter.tiles import fused_space


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace:
    """Seeds let some programs read and add up while the others compute, because saturating reads take many programs."""
    return fused_space(problem, hardware, "pull_reduce", 32)
