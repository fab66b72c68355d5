"""Search spaces of All-Gather + GEMM whose warps have roles, one function per variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.kernels import tiling
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.scaled import as_words
from autotax.spaces import scaled
from autotax.spaces.gemm_roles import STAGES, Fits, codes_fit, fits, have_roles, most_stages, time_of
from autotax.spaces.gemm_tiles import MOST_ROWS, order_parameters

BLOCKS_N = tuple(sorted({*tiling.BLOCKS_OF_B, *itertools.chain(*tiling.BLOCKS_BESIDE_A.values())}))
BOXES = (1, 2)
"""TMA boxes in flight per sender. One round takes about 5 us, so 132 senders with one box each reach 230 GB/s."""
BY_WORDS = (0, 128, 256, 512, 768, 1024, 1536)
"""Number of leading columns of K that are sent as LL words, which need no signal."""
PACES = (0, 240, 270, 300, 330, 350)
"""Rate in GB/s that a rank's senders keep to; 0 means no limit."""
WORDS_OF_A_SHARD = 1 << 17
"""Elements of a shard that seeds send as words: 2.4 us of link time with four ranks. Measured like PACE."""
PACE, SLOWER = 330, 300
"""GB/s. PACE is the rate that links of 350 GB/s carry without queueing; SLOWER suits some GEMMs of one wave. Measured on two H200
that sent as much as four do.
"""
LEAST_CHUNK = 256
"""Fewest rows per signal where several waves of tiles wait."""
MOST_K_GROUPS = 32
"""Most K groups: each polled flag takes one lane of a warp."""
SCALED_WIDEST = 2 * tiling.PART_ROWS
"""Columns of the only tile of e4m3 whose parts are multiplied one after the other."""
COLUMNS_OF_A_GROUP = 512
"""Fewest columns of K per signal: a signal costs a sending processor about 3 us, while others go on sending."""


def _applies(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Shards must be equal."""
    return problem.shard_rows * problem.world_size == problem.m and problem.shard == "m" and have_roles(problem, hardware)


def _blocks_of_a(problem: AllGatherGemm) -> tuple[int, ...]:
    """Rows of a tile: of one shard, or of two where shards have only half as many."""
    two = 2 * tiling.GROUP_ROWS if problem.m % (2 * tiling.GROUP_ROWS) == 0 else 0
    return tuple(block for block in tiling.BLOCKS_M if problem.shard_rows % block == 0 or block == two)


def _lies_across(problem: AllGatherGemm, block_m: int, block_n: int) -> bool:
    return problem.shard_rows % block_m != 0 and tiling.x_is_a_block_of_b(block_m, block_n)


def _push_specialized_tile_seeds(
    problem: AllGatherGemm, hardware: Hardware, suits: Callable[[int, int], bool], fits: Fits, boxes: int = 1
) -> list[dict[str, Value]]:
    """Tiles sorted by `time_of`, each with as many stages as fit."""
    seeds = []
    for block_m, block_n in itertools.product(_blocks_of_a(problem), BLOCKS_N):
        if suits(block_m, block_n) and not _lies_across(problem, block_m, block_n):
            stages = most_stages(hardware, block_m, block_n, boxes, fits)
            seeds.append((time_of(problem, hardware.processors, block_m, block_n), block_m, block_n, stages))
    return [{"block_m": m, "block_n": n, "num_stages": stages} for _, m, n, stages in sorted(seeds)]


def push_specialized(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """The space of the variant, or None where it does not apply."""
    return _specialized("push_specialized", problem, hardware, tiling.is_a_tile, BY_WORDS, fits)


def scaled_specialized(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """That of `push_specialized` for words of two codes, which take the time of numbers of 16 bits. X is a block of A, and some
    columns travel as words, with the scales.
    """
    if problem.dtype != "e4m3" or problem.operand != "e4m3":
        return None
    columns = scaled.BLOCKS_OF_ONE_SCALE if problem.scales == "block" else BLOCKS_N

    def suits(block_m: int, block_n: int) -> bool:
        whole = block_n <= tiling.MOST_TOGETHER or block_n == SCALED_WIDEST
        return block_n in tiling.BLOCKS_BESIDE_A.get(block_m, ()) and whole and block_n in columns

    space = _specialized("scaled_specialized", as_words(problem), hardware, suits, BY_WORDS[1:], codes_fit)
    return space and scaled.with_strips(space, problem)


def _specialized(
    variant: str, problem: AllGatherGemm, hardware: Hardware, suits: Callable[[int, int], bool], by_words: tuple[int, ...],
    fits: Fits,
) -> VariantSpace | None:  # fmt: skip
    """A warp-specialized GEMM of tiles that it `suits` and whose shared memory `fits`."""
    if problem.shard_rows % tiling.GROUP_ROWS or not _applies(problem, hardware):
        return None
    orders = order_parameters(problem)["order"]
    whole = power_of_two(problem.shard_rows)
    groups = powers_of_two(1, max(1, min(MOST_K_GROUPS, problem.shard_cols // tiling.K_ALIGNMENT)))
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": _blocks_of_a(problem),
        "block_n": BLOCKS_N,
        "num_stages": STAGES,
        "group_m": (1, 4, 8),
        "order": orders,
        "chunk_rows": powers_of_two(tiling.GROUP_ROWS, whole),
        "by_words": tuple(columns for columns in by_words if 2 * columns <= problem.shard_cols),
        "k_groups": groups,
        "boxes": BOXES if problem.world_size == 2 else BOXES[:1],
        "pace": PACES,
    }
    constraints = (
        Constraint(("block_m", "block_n"), suits, "no one, two or three groups of warps share out such a tile"),
        Constraint(
            ("block_m", "block_n"),
            lambda m, n: not suits(m, n) or not _lies_across(problem, m, n),
            "blocks of A may lie across shards only where groups of warps share them out",
        ),
        Constraint(
            ("block_m", "block_n", "num_stages", "boxes"),
            lambda m, n, stages, boxes: not suits(m, n) or fits(hardware, m, n, stages, boxes),
            "the pipeline does not fit in shared memory",
        ),
    )
    if not parameters["by_words"] or not any(itertools.starmap(suits, itertools.product(parameters["block_m"], BLOCKS_N))):
        return None
    values = _push_specialized_seeds(problem, hardware, orders, parameters, suits, fits)
    if variant != "push_specialized":  # no search has said yet which tiles are fast: different ones come first
        firsts = {(value["block_m"], value["block_n"]): value for value in reversed(values)}
        values.sort(key=lambda value: firsts[value["block_m"], value["block_n"]] is not value)
    return VariantSpace(variant, parameters, constraints, tuple(Config.of(variant, value) for value in values))


def _push_specialized_seeds(
    problem: AllGatherGemm, hardware: Hardware, orders: tuple[Value, ...], parameters: dict[str, tuple[Value, ...]],
    suits: Callable[[int, int], bool], fits: Fits,
) -> list[dict[str, Value]]:  # fmt: skip
    """Values of seeds. K groups are of whole shards where there is one wave, of a quarter of their rows where more."""
    groups, chunks = parameters["k_groups"], parameters["chunk_rows"]
    whole = int(chunks[-1])
    tiles = _push_specialized_tile_seeds(problem, hardware, suits, fits)
    block_m, block_n = int(tiles[0]["block_m"]), int(tiles[0]["block_n"])
    waves = ceil_div(problem.m // block_m * ceil_div(problem.n, block_n), hardware.processors)
    fine = next(group for group in reversed(groups) if group == 1 or problem.shard_cols >= int(group) * COLUMNS_OF_A_GROUP)
    # Sends as many words of a shard as arrive in the time of a box, or none where the rows would make that take longer.
    most = WORDS_OF_A_SHARD // problem.shard_rows
    fewest = int(parameters["by_words"][0])
    by_words = max((int(columns) for columns in parameters["by_words"] if int(columns) <= most), default=fewest)
    defaults: dict[str, Value] = {"group_m": 8, "order": orders[-1], "chunk_rows": whole, "by_words": by_words, "k_groups": fine}
    defaults |= {"boxes": 1, "pace": PACE}
    if waves > 1:
        defaults |= {"chunk_rows": next(chunk for chunk in chunks if int(chunk) >= min(whole, max(whole // 4, LEAST_CHUNK)))}
    others: list[dict[str, Value]] = [{"pace": SLOWER}, {"k_groups": groups[-1]}, {"k_groups": groups[0]}, {"group_m": 4}]
    others[1:1] = [{"by_words": columns} for columns in (0, by_words // 2) if columns in parameters["by_words"]]
    values = [tile | defaults for tile in tiles[:3]] + [tiles[0] | defaults | other for other in others]
    both = len(parameters["boxes"])
    if both > 1:
        values.insert(1, _push_specialized_tile_seeds(problem, hardware, suits, fits, boxes=2)[0] | defaults | {"boxes": 2})
    # A longer search on two H200 preferred slower boxes at nine of eleven shapes, more words at four, and one stage fewer at
    # three.
    more = next((columns for columns in parameters["by_words"] if int(columns) >= 2 * by_words > 0), by_words)
    calm = [value | {"pace": SLOWER, "by_words": more} for value in values[:both]]
    values[2:2] = [*calm, calm[-1] | {"num_stages": max(STAGES[0], int(calm[-1]["num_stages"]) - 1)}]
    return list({tuple(value.items()): value for value in values}.values())


BLOCKS_K = (64, 128)
LOW = 32
"""Most rows of a tile whose products take little time compared with a barrier per 64 columns. Measured like PACE."""
PUSH_WORDS_STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
USUAL_COLUMNS = 768
"""Columns of B to prefetch; more delays the LL words. Measured on two H200 that sent as much as four do."""
K_GROUPS = (1, 2, 4, 8)
USUAL_K_GROUPS = (4, 2, 1)


def _divides(problem: AllGatherGemm, groups: int) -> bool:
    return groups == 1 or problem.shard_cols % (groups * tiling.K_ALIGNMENT) == 0


def push_words(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """The space of the variant, or None where it does not apply or does not help."""
    return _by_words("push_words", problem, hardware, BLOCKS_N)


def scaled_push_words(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """That of `push_words` for words of two codes."""
    if problem.dtype != "e4m3" or problem.operand != "e4m3":
        return None
    columns = scaled.BLOCKS_OF_ONE_SCALE if problem.scales == "block" else BLOCKS_N
    return _by_words("scaled_push_words", as_words(problem), hardware, columns)


def _by_words(variant: str, problem: AllGatherGemm, hardware: Hardware, columns: tuple[int, ...]) -> VariantSpace | None:
    """Tiles with so many columns."""
    if problem.m > MOST_ROWS or not _applies(problem, hardware):
        return None
    blocks = [block for block in tiling.TILES_BY_WORDS if block // 2 < problem.m] or [min(tiling.TILES_BY_WORDS)]
    tiles = [(m, n) for m in blocks for n in tiling.TILES_BY_WORDS[m] if n in columns]
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": tuple(blocks),
        "block_n": tuple(sorted({n for _, n in tiles})),
        "block_k": BLOCKS_K,
        "num_stages": PUSH_WORDS_STAGES,
        "k_groups": tuple(groups for groups in K_GROUPS if _divides(problem, groups)),
    }
    constraints = (
        Constraint(("block_m", "block_n"), lambda m, n: (m, n) in tiles, "no one or two groups of warps share out such a tile"),
        Constraint(
            ("block_m", "block_n", "block_k", "num_stages"),
            lambda m, n, k, stages: (m, n) not in tiles or fits(hardware, m, n, stages, block_k=k),
            "the pipeline does not fit in shared memory",
        ),
    )
    seeds = tuple(Config.of(variant, values) for values in _push_words_seeds(problem, hardware, tiles))
    return VariantSpace(variant, parameters, constraints, seeds)


def _push_words_seeds(problem: AllGatherGemm, hardware: Hardware, tiles: list[tuple[int, int]]) -> list[dict[str, Value]]:
    """Tiles sorted by estimated time, with as many stages as fit, up to USUAL_COLUMNS of B."""
    order = sorted(tiles, key=lambda tile: (time_of(problem, hardware.processors, *tile), tile))
    groups = [group for group in USUAL_K_GROUPS if _divides(problem, group)]
    values: list[dict[str, Value]] = []
    for (m, n), number in [*itertools.product(order[:1], groups), *itertools.product(order[1:3], groups[:1])]:
        k = BLOCKS_K[m <= LOW]
        depths = [stages for stages in PUSH_WORDS_STAGES if stages * k <= USUAL_COLUMNS]
        most = max(stages for stages in depths if fits(hardware, m, n, stages, block_k=k))
        values.append({"block_m": m, "block_n": n, "block_k": k, "num_stages": most, "k_groups": number})
    return values
