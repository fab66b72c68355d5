"""Search space of `pull`: the tiles, and the order of the shards."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.die_orders import for_dies
from autotax.spaces.all_gather_gemm.tiles import order_parameters, seeds_of, tile_constraints, tile_parameters


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Only the GEMM has parameters, because nothing is sent."""
    if problem.weight != "nk":
        return None
    orders = order_parameters(problem)
    seeds = seeds_of(problem, hardware, "pull", [{"order": orders["order"][-1]}], 1)
    found = VariantSpace("pull", tile_parameters(problem, hardware) | orders, tile_constraints(problem, hardware), seeds)
    return for_dies(found, problem, hardware)
