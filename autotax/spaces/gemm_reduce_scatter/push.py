"""Search space of `push`: tiles, number of adding programs, payload type, and granularity of flags."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces.gemm_reduce_scatter.tiles import fused_space


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace:
    """In most seeds all programs compute first and add up afterwards."""
    return fused_space(problem, hardware, "push", 0)
