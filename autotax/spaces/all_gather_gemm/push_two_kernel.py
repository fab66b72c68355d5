"""Search space of `push_two_kernel`: that of `push`, and whether its two kernels run concurrently."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.die_orders import for_dies
from autotax.spaces.all_gather_gemm.push import extras
from autotax.spaces.all_gather_gemm.tiles import seeds_of, sending, tile_constraints, tile_parameters


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """`beside`: whether the two kernels run concurrently or one after the other."""
    if problem.weight != "nk":
        return None
    firsts: list[dict[str, Value]] = [extras(problem, hardware)[0] | {"beside": beside} for beside in (1, 0)]
    found = VariantSpace(
        "push_two_kernel",
        tile_parameters(problem, hardware) | sending(problem, hardware) | {"beside": (0, 1)},
        tile_constraints(problem, hardware),
        seeds_of(problem, hardware, "push_two_kernel", firsts, 0),
    )
    return for_dies(found, problem, hardware)
