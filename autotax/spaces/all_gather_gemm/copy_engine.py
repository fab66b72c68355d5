"""Search space of `copy_engine`: chunks that copy engines send, and the GEMM that waits for them."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.die_orders import for_dies
from autotax.spaces.all_gather_gemm.tiles import (
    LEAST_HALF,
    chunk_parameters,
    order_parameters,
    seeds_of,
    split_constraints,
    split_parameters,
    tile_constraints,
    tile_parameters,
)


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Large shards get a seed that sends halves: with slow links, tiles can then start on the first half of the last shard. A
    chunk costs 5 us.
    """
    if problem.weight != "nk":
        return None
    orders, chunks = order_parameters(problem), chunk_parameters(problem)
    rows = chunks["chunk_rows"]
    whole: dict[str, Value] = {"order": orders["order"][0], "chunk_rows": rows[-1], "streams": 1, "splits": 1}
    halves = [whole | {"chunk_rows": rows[-2]}] if problem.shard_rows >= 2 * LEAST_HALF else []
    found = VariantSpace(
        "copy_engine",
        tile_parameters(problem, hardware)
        | orders
        | chunks
        | split_parameters(problem, hardware)
        | {"streams": powers_of_two(1, max(1, min(3, problem.world_size - 1)))},
        (*tile_constraints(problem, hardware), *split_constraints(problem, hardware)),
        seeds_of(problem, hardware, "copy_engine", [whole, whole | {"order": orders["order"][-1]}, *halves], 3),
    )
    return for_dies(found, problem, hardware)
