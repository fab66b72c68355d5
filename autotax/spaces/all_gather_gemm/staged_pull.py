"""Search space of `staged_pull`: tiles, programs that fetch, and the granularity of flags."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.die_orders import for_dies
from autotax.spaces.all_gather_gemm.tiles import (
    chunk_parameters,
    comm_programs,
    k_group_parameters,
    order_parameters,
    seeds_of,
    sending,
    tile_constraints,
    tile_parameters,
)


def _extras(problem: AllGatherGemm, hardware: Hardware) -> list[dict[str, Value]]:
    """As in `push`, but more programs, because reads need more of them than writes to saturate the links."""
    orders, rows = order_parameters(problem)["order"], chunk_parameters(problem)["chunk_rows"]
    comms, groups = comm_programs(hardware), k_group_parameters(problem)["k_groups"]
    whole, some = rows[-1], groups[len(groups) // 2]
    return [
        {"order": orders[-1], "chunk_rows": whole, "comm": comms[-1], "k_groups": some, "pieces": 8},
        {"order": orders[0], "chunk_rows": whole, "comm": min(32, comms[-1]), "k_groups": some, "pieces": 4},
    ]


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """As in `push`, without tiles across shards and without split-K."""
    if problem.weight != "nk":
        return None
    seeds = seeds_of(problem, hardware, "staged_pull", _extras(problem, hardware), 1)
    parameters = tile_parameters(problem, hardware) | sending(problem, hardware)
    found = VariantSpace("staged_pull", parameters, tile_constraints(problem, hardware), seeds)
    return for_dies(found, problem, hardware)
