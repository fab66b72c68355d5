"""What may vary in `pull_reduce`: as in `push`."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces.gemm_reduce_scatter.tiles import fused_space


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace:
    """Usually some programs read and add up while the others compute: links carry reads only as fast as many programs ask."""
    return fused_space(problem, hardware, "pull_reduce", 32)
