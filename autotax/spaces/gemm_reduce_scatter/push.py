"""What may vary in `push`: tiles, who adds up, what is sent, and the granularity of flags."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces.gemm_reduce_scatter.tiles import fused_space


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace:
    """Usually all programs compute, and add up when they have."""
    return fused_space(problem, hardware, "push", 0)
