"""The search space of `push_specialized`: what a GEMM of warps with roles asks of a problem and of a machine."""

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
"""That a sender has on their way. A turn takes it some 5 us, so with one box to one peer 132 senders reach 230 GB/s."""
BY_WORDS = (0, 128, 256, 512, 768, 1024, 1536)
"""Of K, the first columns, which go by words that need no signal."""
PACES = (0, 240, 270, 300, 330, 350)
"""GB/s at which a rank sends, 0 as fast as it can."""
WORDS_OF_A_SHARD = 1 << 17
"""Elements of a shard that the seeds send by words: 2.4 us of the links among four. Two H200 that send as four do."""
PACE, SLOWER = 330, 300
"""What links of 350 GB/s carry without a queue, and less, which suits some GEMMs of one wave. Two H200 that send as four do."""
LEAST_CHUNK = 256
"""Rows for which it is worth a signal, where several waves of tiles wait."""
MOST_K_GROUPS = 32
"""A lane for each that is polled."""
STAGES = (2, 3, 4, 5, 6, 7, 8)
BARRIER_BYTES = 1024
"""Enough for those of 32 K groups and eight stages."""
STALLS = 1.12
"""Times as long as the products of a tile take by themselves. One H200."""
BYTES = 60
"""A cycle, that a processor loads at best. One H200."""
CYCLES_OF_A_TILE = 6000
"""Of its first load and its last store, which nothing hides. One H200."""
COLUMNS_OF_A_GROUP = 512
"""Of K, for which it is worth a signal: it takes some 3 us of a processor that sends, in which others send."""


def have_roles(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether warps with roles can compute it: Hopper's instructions, equal shards, and TMA for all matrices."""
    whole = problem.shard == "m" and problem.shard_rows * problem.world_size == problem.m
    aligned = problem.item_size == 2 and problem.k % 8 == 0 and problem.n % 8 == 0 and problem.weight == "nk"
    return whole and aligned and hardware.target == "cuda:90" and problem.world_size <= MOST_RANKS


def shared_bytes(block_m: int, block_n: int, stages: int, boxes: int) -> int:
    """At least what the kernel takes of shared memory: buffers, what is staged on its way out, boxes, barriers."""
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
    """Of whole waves of tiles, in cycles: either the products or what they need limits them."""
    waves = ceil_div(ceil_div(problem.m, block_m) * ceil_div(problem.n, block_n), processors)
    x, y = sides(block_m, block_n)
    # Of 64 x part x 16: 2048 multiplications a cycle, 128 bytes a cycle from shared memory.
    products = x // GROUP_ROWS * sum(max(part / 2, 16 + part / 4) for part in parts_of(y)) / 16
    return waves * (problem.k * max(products * STALLS, (x + y) * problem.item_size / BYTES) + CYCLES_OF_A_TILE)


def _tile_seeds(problem: AllGatherGemm, hardware: Hardware, boxes: int = 1) -> list[dict[str, Value]]:
    """Tiles by the time that they take, each with as many stages as fit."""
    found = []
    for block_m, block_n in itertools.product(_blocks_of_a(problem), BLOCKS_N):
        if is_a_tile(block_m, block_n) and not _lies_across(problem, block_m, block_n):
            stages = max(number for number in STAGES if _fits(hardware, block_m, block_n, number, boxes))
            found.append((time_of(problem, hardware.processors, block_m, block_n), block_m, block_n, stages))
    return [{"block_m": m, "block_n": n, "num_stages": stages} for _, m, n, stages in sorted(found)]


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """The space of the variant, or None where it cannot be."""
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
    """One wave of tiles waits for K groups of whole shards, more of them for those of a quarter of the rows."""
    groups, chunks = parameters["k_groups"], parameters["chunk_rows"]
    whole = int(chunks[-1])
    tiles = _tile_seeds(problem, hardware)
    block_m, block_n = int(tiles[0]["block_m"]), int(tiles[0]["block_n"])
    waves = ceil_div(problem.m // block_m * ceil_div(problem.n, block_n), hardware.processors)
    fine = next(group for group in reversed(groups) if group == 1 or problem.shard_cols >= int(group) * COLUMNS_OF_A_GROUP)
    # As many words of a shard as a box takes to come, or none where so many rows of them would take longer.
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
    # A longer search on two H200 came to boxes that go out more slowly at nine of eleven shapes, to more words at four of them,
    # and at three to a stage less than fit.
    more = next((columns for columns in parameters["by_words"] if int(columns) >= 2 * by_words > 0), by_words)
    calm = [value | {"pace": SLOWER, "by_words": more} for value in values[:both]]
    values[2:2] = [*calm, calm[-1] | {"num_stages": max(STAGES[0], int(calm[-1]["num_stages"]) - 1)}]
    return tuple(dict.fromkeys(Config.of(VARIANT, value) for value in values))
