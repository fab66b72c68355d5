"""Search space of `push`: tiles, programs that send, and the granularity of flags."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.die_orders import for_dies
from autotax.spaces.all_gather_gemm.tiles import (
    chunk_parameters,
    comm_programs,
    k_group_parameters,
    may_lie_across,
    order_parameters,
    seeds_of,
    sending,
    split_constraints,
    split_parameters,
    tile_constraints,
    tile_parameters,
)


def extras(problem: AllGatherGemm, hardware: Hardware) -> list[dict[str, Value]]:
    """16 to 32 comm programs saturate the links. A tile waits for few flags; K groups let it begin early."""
    orders, rows = order_parameters(problem)["order"], chunk_parameters(problem)["chunk_rows"]
    comms, groups = comm_programs(hardware), k_group_parameters(problem)["k_groups"]
    few, many = min(16, comms[-1]), min(32, comms[-1])
    whole, half, some = rows[-1], rows[len(rows) // 2], groups[len(groups) // 2]
    return [
        {"order": orders[-1], "chunk_rows": whole, "comm": few, "k_groups": groups[-1], "pieces": 4},
        {"order": orders[-1], "chunk_rows": whole, "comm": many, "k_groups": groups[-1], "pieces": 8},
        {"order": orders[0], "chunk_rows": whole, "comm": few, "k_groups": some, "pieces": 8},
        {"order": orders[-1], "chunk_rows": whole, "comm": few, "k_groups": some, "pieces": 4},
        {"order": orders[0], "chunk_rows": half, "comm": few, "k_groups": 1, "pieces": 8},
    ]


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """If a shard has few rows, a tile may span several shards."""
    if problem.weight != "nk":
        return None
    across = int(may_lie_across(problem))
    highest = max(tile_parameters(problem, hardware)["block_m"])
    within = Constraint(
        ("block_m", "across"), lambda block, across: across == 1 or block <= highest, "the tile is higher than a shard"
    )
    firsts = [extra | {"across": across, "splits": 1} for extra in extras(problem, hardware)]
    found = VariantSpace(
        "push",
        tile_parameters(problem, hardware, across=across == 1)
        | sending(problem, hardware)
        | split_parameters(problem, hardware)
        | {"across": tuple(range(across + 1))},
        (*tile_constraints(problem, hardware), *split_constraints(problem, hardware, "across"), within),
        seeds_of(problem, hardware, "push", firsts, 5),
    )
    return for_dies(found, problem, hardware, sends=True)
