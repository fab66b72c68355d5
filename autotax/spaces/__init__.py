"""WHAT MAY VARY: one module an operator."""

from __future__ import annotations

from autotax.hardware import Hardware
from autotax.problem import AllGatherGemm, FlashDecode, Problem
from autotax.spaces.all_gather_gemm import all_gather_gemm_space
from autotax.spaces.flash_decode import flash_decode_space
from autotax.spaces.space import Constraint, Space, VariantSpace

__all__ = ["Constraint", "Space", "VariantSpace", "space_for"]


def space_for(problem: Problem, hardware: Hardware) -> Space:
    """The search space of a problem on a machine."""
    if isinstance(problem, AllGatherGemm):
        return all_gather_gemm_space(problem, hardware)
    assert isinstance(problem, FlashDecode)
    return flash_decode_space(problem, hardware)
