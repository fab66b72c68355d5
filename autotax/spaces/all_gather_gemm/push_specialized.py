"""Search space of `push_specialized`: what a warp-specialized GEMM needs from a problem and a machine."""

from __future__ import annotations

import itertools

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.kernels.tiling import (
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
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.tiles import order_parameters

VARIANT = "push_specialized"
BLOCKS_N = tuple(sorted({*BLOCKS_OF_B, *itertools.chain(*BLOCKS_BESIDE_A.values())}))
BOXES = (1, 2)
"""TMA boxes in flight per sender. One round takes about 5 us, so 132 senders with one box each reach 230 GB/s."""
BY_WORDS = (0, 128, 256, 512, 768, 1024, 1536)
"""Number of leading columns of K that are sent as LL words, which need no signal."""
PACES = (0, 240, 270, 300, 330, 350)
"""Rate in GB/s that a rank's senders keep to; 0 means no limit."""
WORDS_OF_A_SHARD = 1 << 17
"""Elements of a shard that seeds send as words: 2.4 us of link time with four ranks. Measured on two H200 that sent as much as
four do.
"""
PACE, SLOWER = 330, 300
"""GB/s. PACE is the rate that links of 350 GB/s carry without queueing; SLOWER suits some GEMMs of one wave. Measured on two H200
that sent as much as four do.
"""
LEAST_CHUNK = 256
"""Fewest rows per signal where several waves of tiles wait."""
MOST_K_GROUPS = 32
"""Most K groups: each polled flag takes one lane of a warp."""
STAGES = (2, 3, 4, 5, 6, 7, 8)
BARRIER_BYTES = 1024
"""Shared memory for the barriers of 32 K groups and eight stages."""
STALLS = 1.12
"""Time of a tile's main loop over the time of its matrix products alone. Measured on one H200."""
BYTES = 60
"""Bytes per cycle that a processor loads at best. Measured on one H200."""
CYCLES_OF_A_TILE = 6000
"""Cycles of a tile's first load and last store, which nothing hides. Measured on one H200."""
COLUMNS_OF_A_GROUP = 512
"""Fewest columns of K per signal: a signal costs a sending processor about 3 us, while others go on sending."""


def have_roles(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether the warp-specialized GEMM applies: it needs Hopper's instructions, equal shards, and TMA for all matrices."""
    whole = problem.shard == "m" and problem.shard_rows * problem.world_size == problem.m
    aligned = problem.item_size == 2 and problem.k % 8 == 0 and problem.n % 8 == 0 and problem.weight == "nk"
    return whole and aligned and hardware.target == "cuda:90" and problem.world_size <= MOST_RANKS


def shared_bytes(block_m: int, block_n: int, stages: int, boxes: int) -> int:
    """Lower bound of the kernel's shared memory: operand buffers, staged output, boxes, barriers."""
    x, y = sides(block_m, block_n)
    elements = stages * (x + y) * BLOCK_K + x * parts_of(y)[0] + boxes * GROUP_ROWS * BLOCK_K
    return 2 * elements + BARRIER_BYTES


def _fits(hardware: Hardware, block_m: int, block_n: int, stages: int, boxes: int) -> bool:
    return shared_bytes(block_m, block_n, stages, boxes) <= hardware.shared_memory


def _blocks_of_a(problem: AllGatherGemm) -> tuple[int, ...]:
    """Rows of a tile: of one shard, or of two where shards have only half as many."""
    half = problem.m % (2 * GROUP_ROWS) == 0
    return tuple(block for block in BLOCKS_M if problem.shard_rows % block == 0 or (block == 2 * GROUP_ROWS and half))


def _lies_across(problem: AllGatherGemm, block_m: int, block_n: int) -> bool:
    return problem.shard_rows % block_m != 0 and x_is_a_block_of_b(block_m, block_n)


def time_of(problem: AllGatherGemm, processors: int, block_m: int, block_n: int) -> float:
    """Estimated cycles of a call, in whole waves of tiles, bound by either the matrix products or the loads."""
    waves = ceil_div(ceil_div(problem.m, block_m) * ceil_div(problem.n, block_n), processors)
    x, y = sides(block_m, block_n)
    # Each instruction multiplies 64 x part x 16: 2048 multiplications a cycle, 128 bytes a cycle from shared memory.
    products = x // GROUP_ROWS * sum(max(part / 2, 16 + part / 4) for part in parts_of(y)) / 16
    return waves * (problem.k * max(products * STALLS, (x + y) * problem.item_size / BYTES) + CYCLES_OF_A_TILE)


def _tile_seeds(problem: AllGatherGemm, hardware: Hardware, boxes: int = 1) -> list[dict[str, Value]]:
    """Tiles sorted by `time_of`, each with as many stages as fit."""
    found = []
    for block_m, block_n in itertools.product(_blocks_of_a(problem), BLOCKS_N):
        if is_a_tile(block_m, block_n) and not _lies_across(problem, block_m, block_n):
            stages = max(number for number in STAGES if _fits(hardware, block_m, block_n, number, boxes))
            found.append((time_of(problem, hardware.processors, block_m, block_n), block_m, block_n, stages))
    return [{"block_m": m, "block_n": n, "num_stages": stages} for _, m, n, stages in sorted(found)]


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """The space of the variant, or None where it does not apply."""
    if problem.shard_rows % GROUP_ROWS or not have_roles(problem, hardware):
        return None
    orders = order_parameters(problem)["order"]
    whole = power_of_two(problem.shard_rows)
    groups = powers_of_two(1, max(1, min(MOST_K_GROUPS, problem.shard_cols // K_ALIGNMENT)))
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": _blocks_of_a(problem),
        "block_n": BLOCKS_N,
        "num_stages": STAGES,
        "group_m": (1, 4, 8),
        "order": orders,
        "chunk_rows": powers_of_two(GROUP_ROWS, whole),
        "by_words": tuple(columns for columns in BY_WORDS if 2 * columns <= problem.shard_cols),
        "k_groups": groups,
        "boxes": BOXES if problem.world_size == 2 else BOXES[:1],
        "pace": PACES,
    }
    constraints = (
        Constraint(("block_m", "block_n"), is_a_tile, "no one, two or three groups of warps share out such a tile"),
        Constraint(
            ("block_m", "block_n"),
            lambda m, n: not is_a_tile(m, n) or not _lies_across(problem, m, n),
            "blocks of A may lie across shards only where groups of warps share them out",
        ),
        Constraint(
            ("block_m", "block_n", "num_stages", "boxes"),
            lambda m, n, stages, boxes: not is_a_tile(m, n) or _fits(hardware, m, n, stages, boxes),
            "the pipeline does not fit in shared memory",
        ),
    )
    return VariantSpace(VARIANT, parameters, constraints, _seeds(problem, hardware, orders, parameters))


def _seeds(
    problem: AllGatherGemm, hardware: Hardware, orders: tuple[Value, ...], parameters: dict[str, tuple[Value, ...]]
) -> tuple[Config, ...]:
    """Seeds. With one wave, tiles wait for K groups of whole shards; with several waves, for K groups of a quarter of a shard's
    rows.
    """
    groups, chunks = parameters["k_groups"], parameters["chunk_rows"]
    whole = int(chunks[-1])
    tiles = _tile_seeds(problem, hardware)
    block_m, block_n = int(tiles[0]["block_m"]), int(tiles[0]["block_n"])
    waves = ceil_div(problem.m // block_m * ceil_div(problem.n, block_n), hardware.processors)
    fine = next(group for group in reversed(groups) if group == 1 or problem.shard_cols >= int(group) * COLUMNS_OF_A_GROUP)
    # Sends as many words of a shard as arrive in the time of a box, or none where the rows would make that take longer.
    most = WORDS_OF_A_SHARD // problem.shard_rows
    by_words = max(int(columns) for columns in parameters["by_words"] if int(columns) <= most)
    usual: dict[str, Value] = {"group_m": 8, "order": orders[-1], "chunk_rows": whole, "by_words": by_words, "k_groups": fine}
    usual |= {"boxes": 1, "pace": PACE}
    if waves > 1:
        usual |= {"chunk_rows": next(chunk for chunk in chunks if int(chunk) >= min(whole, max(whole // 4, LEAST_CHUNK)))}
    others: list[dict[str, Value]] = [{"pace": SLOWER}, {"k_groups": groups[-1]}, {"k_groups": groups[0]}, {"group_m": 4}]
    others[1:1] = [{"by_words": columns} for columns in (0, by_words // 2) if columns in parameters["by_words"]]
    values = [tile | usual for tile in tiles[:3]] + [tiles[0] | usual | other for other in others]
    both = len(parameters["boxes"])
    if both > 1:
        values.insert(1, _tile_seeds(problem, hardware, boxes=2)[0] | usual | {"boxes": 2})
    # A longer search on two H200 preferred slower boxes at nine of eleven shapes, more words at four, and one stage fewer at
    # three.
    more = next((columns for columns in parameters["by_words"] if int(columns) >= 2 * by_words > 0), by_words)
    calm = [value | {"pace": SLOWER, "by_words": more} for value in values[:both]]
    values[2:2] = [*calm, calm[-1] | {"num_stages": max(STAGES[0], int(calm[-1]["num_stages"]) - 1)}]
    return tuple(dict.fromkeys(Config.of(VARIANT, value) for value in values))
