"""The search space of `push_specialized`: what a GEMM of warps with roles asks of a problem and of a machine."""

from __future__ import annotations

import itertools

from autotax.config import Config, Value
from autotax.hardware import Hardware
from autotax.problem import AllGatherGemm, ceil_div, power_of_two
from autotax.spaces.sides import (
    BLOCK_K,
    BLOCKS_BESIDE_A,
    BLOCKS_M,
    BLOCKS_OF_B,
    GROUP_ROWS,
    K_ALIGNMENT,
    MOST_RANKS,
    is_a_tile,
    parts_of,
    sides,
    x_is_a_block_of_b,
)
from autotax.spaces.space import Constraint, VariantSpace, powers_of_two

VARIANT = "push_specialized"
BLOCKS_N = tuple(sorted({*BLOCKS_OF_B, *BLOCKS_BESIDE_A}))
MOST_K_GROUPS = 32
BARRIER_BYTES = 512
RATES = {128: 0.9, 160: 0.93, 192: 0.95}
"""How fast tiles as large as 128 rows and so many columns are multiplied: larger ones 1, smaller ones SMALL. One H200."""
SMALL = 0.7
COLUMNS_OF_A_GROUP = 512
"""Of K, for which it is worth polling a flag; fewer keep the loader busy with polls."""


def is_for(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether the kernel can compute it: Hopper's instructions, shards of whole boxes, and TMA for all matrices."""
    rows = problem.shard_rows
    whole = problem.shard == "m" and rows * problem.world_size == problem.m and rows % GROUP_ROWS == 0
    aligned = problem.item_size == 2 and problem.k % 8 == 0 and problem.n % 8 == 0
    return whole and aligned and hardware.target == "cuda:90" and problem.world_size <= MOST_RANKS


def _fits(hardware: Hardware, block_m: int, block_n: int, stages: int) -> bool:
    x, y = sides(block_m, block_n)
    elements = stages * (x + y) * BLOCK_K + x * parts_of(y)[0] + GROUP_ROWS * BLOCK_K
    return 2 * elements + BARRIER_BYTES <= hardware.shared_memory


def _blocks_of_a(problem: AllGatherGemm) -> tuple[int, ...]:
    """Rows of a tile: of one shard, or of two where shards have only half as many."""
    half = problem.m % (2 * GROUP_ROWS) == 0
    return tuple(block for block in BLOCKS_M if problem.shard_rows % block == 0 or (block == 2 * GROUP_ROWS and half))


def _lies_across(problem: AllGatherGemm, block_m: int, block_n: int) -> bool:
    return problem.shard_rows % block_m != 0 and x_is_a_block_of_b(block_m, block_n)


def _time_of(problem: AllGatherGemm, processors: int, block_m: int, block_n: int) -> float:
    """Of whole waves of tiles, in elements at the best rate."""
    tiles = problem.m // block_m * ceil_div(problem.n, block_n)
    columns = block_m * block_n // 128
    rate = RATES.get(columns, 1.0 if columns > max(RATES) else SMALL)
    return ceil_div(tiles, processors) * block_m * block_n / rate


def _tile_seeds(problem: AllGatherGemm, hardware: Hardware) -> list[dict[str, Value]]:
    """Tiles by the time that they take, each with as many stages as fit, five at most."""
    found = []
    for block_m, block_n in itertools.product(_blocks_of_a(problem), BLOCKS_N):
        if is_a_tile(block_m, block_n) and not _lies_across(problem, block_m, block_n):
            stages = max(number for number in (2, 3, 4, 5) if _fits(hardware, block_m, block_n, number))
            found.append((_time_of(problem, hardware.processors, block_m, block_n), block_m, block_n, stages))
    return [{"block_m": m, "block_n": n, "num_stages": stages} for _, m, n, stages in sorted(found)]


def specialized_spaces(problem: AllGatherGemm, hardware: Hardware, orders: tuple[Value, ...]) -> list[VariantSpace]:
    """The space of the variant, or none where it cannot be."""
    if not is_for(problem, hardware):
        return []
    whole = power_of_two(problem.shard_rows)
    groups = powers_of_two(1, max(1, min(MOST_K_GROUPS, problem.shard_cols // K_ALIGNMENT)))
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": _blocks_of_a(problem),
        "block_n": BLOCKS_N,
        "num_stages": (2, 3, 4, 5, 6),
        "group_m": (1, 4, 8),
        "order": orders,
        "chunk_rows": powers_of_two(GROUP_ROWS, whole),
        "k_groups": groups,
    }
    constraints = (
        Constraint(("block_m", "block_n"), is_a_tile, "no two or three groups of warps share out such a tile"),
        Constraint(
            ("block_m", "block_n"),
            lambda m, n: not is_a_tile(m, n) or not _lies_across(problem, m, n),
            "blocks of A may lie across shards only where groups of warps share them out",
        ),
        Constraint(
            ("block_m", "block_n", "num_stages"),
            lambda m, n, stages: not is_a_tile(m, n) or _fits(hardware, m, n, stages),
            "the pipeline does not fit in shared memory",
        ),
    )
    return [VariantSpace(VARIANT, parameters, constraints, _seeds(problem, hardware, orders, parameters))]


def _seeds(
    problem: AllGatherGemm, hardware: Hardware, orders: tuple[Value, ...], parameters: dict[str, tuple[Value, ...]]
) -> tuple[Config, ...]:
    """One or two waves of tiles wait for K groups of whole shards, more of them for fewer groups of a part of the rows, and tiles
    of two shards, which wait twice, for few.
    """
    groups, chunks = parameters["k_groups"], parameters["chunk_rows"]
    tiles = _tile_seeds(problem, hardware)
    block_m, block_n = int(tiles[0]["block_m"]), int(tiles[0]["block_n"])
    waves = ceil_div(problem.m // block_m * ceil_div(problem.n, block_n), hardware.processors)
    four = groups[min(len(groups) - 1, 2)]
    fine = next(group for group in reversed(groups) if group == 1 or problem.shard_cols >= int(group) * COLUMNS_OF_A_GROUP)
    usual: dict[str, Value] = {"group_m": 8, "order": orders[-1], "chunk_rows": chunks[-1], "k_groups": fine}
    if waves > 2:
        usual |= {"chunk_rows": chunks[max(0, len(chunks) - 3)], "k_groups": four}
    elif problem.shard_rows % block_m:
        usual |= {"k_groups": four}
    others: list[dict[str, Value]] = [{"k_groups": groups[-1]}, {"k_groups": four}, {"k_groups": groups[0]}, {"group_m": 4}]
    values = [tile | usual for tile in tiles[:3]] + [tiles[0] | usual | other for other in others]
    return tuple(dict.fromkeys(Config.of(VARIANT, value) for value in values))
