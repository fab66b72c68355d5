"""Search spaces of All-Gather + GEMM, one function per variant; before them what they share: tiles, limits, orders, seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware, blocks_held, lanes
from autotax.kernels.tiling import (
    BLOCK_K,
    BLOCKS_BESIDE_A,
    BLOCKS_M,
    BLOCKS_OF_B,
    GROUP_ROWS,
    K_ALIGNMENT,
    MOST_RANKS,
    PIECES,
    TILES_BY_WORDS,
    is_a_tile,
    parts_of,
    sides,
    x_is_a_block_of_b,
)
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.scaled import as_words
from autotax.spaces import scaled

MOST_CHUNKS = 64
MOST_ROWS_ACROSS = 128
LEAST_HALF = 1024
"""Fewest rows of a chunk in seeds that cut shards."""
CONTROL_BYTES = {"cuda": 1024}
"""Shared memory beside the blocks of a pipeline, for barriers and exchange between threads. On ROCm there is none."""
ACCUMULATOR_REGISTERS = 160
"""Most float32 accumulators per thread that leave registers for the loop."""
FLOAT32_REGISTERS, FLOAT32_BLOCK_K = 32, 32
"""Most accumulators and largest block of K where no tensor core multiplies float32, and operands take registers, too."""
COSTS_OF_PARTS = (2.0, 1.2)
"""Time of a split-K part over its share of the tile's, in first and last seeds; measured 1.1 to 2.6 (results/notes)."""
RATES = {32768: 1.0, 16384: 0.9, 8192: 0.75, 4096: 0.55}
"""Relative GEMM rate of NVIDIA GPUs by elements of a tile. Smaller tiles read more; sizes not listed are slower still."""
AMD_REGISTERS, AMD_ADDRESSES = 512, 50
"""32-bit registers per lane of a SIMD, shared by its waves; and about how many a wave needs for addresses and counters."""
MOST_SPILLS = 64
"""Most registers per thread that a config may spill, as `spilled_on_amd` estimates. Tiles of 256 x 256 x 64 are tried last: the
compiler spills about 80 of them, nearly all outside the loop over K.
"""
TWO_PRODUCTS = 320
"""Columns of a tile of two products, 256 and 64 wide. It fills one wave where 256 columns would need two; narrower second
products are bound by shared memory, since they read as much of A as wide ones.
"""


def can_use_tma(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """TMA needs rows that start at multiples of 16 bytes, in A's shards and in B."""
    aligned = (problem.shard_cols * problem.item_size) % 16 == 0
    return aligned and (hardware.backend == "cuda" or not hardware.on_gpu)


def _without_tensor_cores(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether tensor cores cannot be used: NVIDIA's round float32 to fewer bits (TF32), which these kernels do not accept."""
    return problem.dtype == "fp32" and hardware.backend == "cuda"


def tile_parameters(problem: AllGatherGemm, hardware: Hardware, *, across: bool = False) -> dict[str, tuple[Value, ...]]:
    rows = power_of_two(problem.m if across else problem.shard_rows)
    warps: tuple[Value, ...] = (4, 8) if hardware.on_gpu else (4,)
    stages: tuple[Value, ...] = (2, 3, 4, 5) if hardware.on_gpu else (2,)
    wider: tuple[Value, ...] = (TWO_PRODUCTS,) if problem.n > 256 else ()
    most_k = FLOAT32_BLOCK_K if _without_tensor_cores(problem, hardware) else 128
    return {
        "block_m": powers_of_two(16, max(64 if across else 16, min(256, rows))),
        "block_n": powers_of_two(32, max(32, min(256, power_of_two(problem.n)))) + wider,
        "block_k": powers_of_two(32, max(32, min(most_k, power_of_two(problem.shard_cols)))),
        "num_warps": warps,
        "num_stages": stages,
        "group_m": (1, 4, 8),
        "loads": ("tma",) if can_use_tma(problem, hardware) else ("pointer",),
    } | _compile_options(problem, hardware)


def _compile_options(problem: AllGatherGemm, hardware: Hardware) -> dict[str, tuple[Value, ...]]:
    """AMD only: rows of a matrix instruction, waves per SIMD to leave registers for (0: the compiler chooses), and steps of K
    packed together. Seeds take the first value of each. Only gfx942 packs several steps, for 16-bit operands.
    """
    if hardware.backend != "rocm":
        return {}
    packed = hardware.target == "hip:gfx942" and problem.item_size == 2
    return {"matrix_instr_nonkdim": (16, 32), "waves_per_eu": (0, 1, 2), "kpack": (1, 2) if packed else (1,)}


def spilled_on_amd(problem: AllGatherGemm, m: int, n: int, k: int, warps: int) -> int:
    """About how many registers of a thread spill: the compiler keeps the accumulators, the operands of a whole block of K, and
    the next block on its way to shared memory. tests/kernels/test_amd_tiles.py compares the estimate with the compiler's report.
    """
    words = problem.item_size / 4 / 64
    sides = min(m / rows + n * rows / warps for rows in powers_of_two(1, warps))
    need = m * n / 64 / warps + sides * k * words + (m + n) * k * words / warps + AMD_ADDRESSES
    return max(0, round(need - AMD_REGISTERS / max(1, warps // 4)))


def tile_constraints(problem: AllGatherGemm, hardware: Hardware) -> tuple[Constraint, ...]:
    registers = FLOAT32_REGISTERS if _without_tensor_cores(problem, hardware) else ACCUMULATOR_REGISTERS
    return (
        Constraint(
            ("block_m", "block_n", "num_warps"),
            lambda m, n, warps: not hardware.on_gpu or m * n <= registers * lanes(hardware) * warps,
            "the accumulator does not fit in registers",
        ),
        Constraint(
            ("block_m", "block_n", "block_k", "num_stages"),
            lambda m, n, k, stages: _pipeline_fits(problem, hardware, m, n, k, stages),
            "the pipeline does not fit in shared memory",
        ),
        Constraint(
            ("block_m", "block_n", "block_k", "num_warps"),
            lambda m, n, k, warps: hardware.backend != "rocm" or spilled_on_amd(problem, m, n, k, warps) <= MOST_SPILLS,
            "the operands do not fit in registers",
        ),
    )


def _pipeline_fits(problem: AllGatherGemm, hardware: Hardware, m: int, n: int, k: int, stages: int) -> bool:
    held = (m + n) * k * problem.item_size * blocks_held(hardware, stages)
    return held + CONTROL_BYTES.get(hardware.backend, 0) <= hardware.shared_memory


def split_parameters(problem: AllGatherGemm, hardware: Hardware) -> dict[str, tuple[Value, ...]]:
    """Split-K choices for tiles that would not fill a wave."""
    blocks = ceil_div(problem.k, int(tile_parameters(problem, hardware)["block_k"][-1]))
    return {"splits": tuple(s for s in ((1, 2, 3, 4, 6, 8) if hardware.on_gpu else (1, 2, 3)) if s <= blocks)}


def count_tiles(problem: AllGatherGemm, block_m: int, block_n: int, across: int = 0) -> int:
    """Tiles of a call: counted per shard, or over all rows at once with `across` or shard k."""
    heights = problem.world_size * problem.shard_rows if across else problem.shard_rows
    shards = problem.world_size if problem.shard == "m" and not across else 1
    return shards * ceil_div(heights, block_m) * ceil_div(problem.n, block_n)


def split_constraints(problem: AllGatherGemm, hardware: Hardware, *names: str) -> tuple[Constraint, ...]:
    """Conditions under which split-K is allowed."""
    left = Constraint(
        ("block_m", "block_n", "splits", *names),
        lambda m, n, splits, across=0: splits == 1 or count_tiles(problem, m, n, across) % hardware.processors != 0,
        "the tiles fill whole waves, so that none is left to cut",
    )
    one = Constraint(
        ("block_n", "splits"),
        lambda n, splits: splits == 1 or n != TWO_PRODUCTS,
        f"tiles of {TWO_PRODUCTS} columns are not cut into parts",
    )
    return left, one


def best_splits(tiles: int, processors: int, choices: tuple[Value, ...], cost: float) -> int:
    """The number of splits with the fewest waves. A part takes `cost` times its share, and adding up an eighth of a tile."""

    def waves(splits: int) -> float:
        whole, left = divmod(tiles, processors)
        parts = ceil_div(left * splits, processors) / splits
        return whole + (parts if splits == 1 else cost * (parts + 0.125))

    return min((int(choice) for choice in choices), key=waves)


def order_parameters(problem: AllGatherGemm) -> dict[str, tuple[Value, ...]]:
    """Orders of the shards. With shard k every tile needs every source, so there is only one."""
    return {"order": ("ring", "interleaved") if problem.shard == "m" and problem.world_size > 2 else ("ring",)}


def chunk_parameters(problem: AllGatherGemm) -> dict[str, tuple[Value, ...]]:
    """Rows per flag: from 16 (or more, to keep the flags of a shard within MOST_CHUNKS) to the whole shard."""
    whole = max(16, power_of_two(problem.shard_rows))
    return {"chunk_rows": powers_of_two(max(16, whole // MOST_CHUNKS), whole)}


def k_group_parameters(problem: AllGatherGemm) -> dict[str, tuple[Value, ...]]:
    """Number of K groups, which a tile awaits one by one. Each group is a range of columns, in whole blocks of K_ALIGNMENT."""
    return {"k_groups": powers_of_two(1, max(1, min(8, problem.shard_cols // K_ALIGNMENT)))}


def _saves_a_wave(problem: AllGatherGemm, workers: int) -> bool:
    """Whether tiles of two products save enough waves of 128 rows to outweigh their 6 % lower rate. `workers` programs compute
    from the start: a wave that leaves no room for the sending programs waits for them.
    """

    def time(width: int) -> float:
        return ceil_div(count_tiles(problem, 128, width), workers) * width

    return 1.06 * time(TWO_PRODUCTS) < time(256)


def _time_of(problem: AllGatherGemm, workers: int, block_m: int, block_n: int, across: bool) -> float:
    """Estimated time of a call with whole tiles of this size: waves times elements of a tile, at the best rate."""
    if block_n == TWO_PRODUCTS:
        return 0.0  # seeded only where it saves a wave
    waves = ceil_div(count_tiles(problem, block_m, block_n, across), workers)
    return waves * block_m * block_n / RATES.get(block_m * block_n, 0.3)


def _tile_seeds(problem: AllGatherGemm, hardware: Hardware, *, across: bool = False, comm: int = 0) -> list[dict[str, Value]]:
    """Tile shapes to try first beside `comm` communicating programs, cut to the problem's size."""
    tiles = tile_parameters(problem, hardware, across=across)
    shapes = [
        (128, 256, 64, 8, 3, 8),
        (128, 256, 64, 8, 4, 8),
        (128, 128, 64, 4, 5, 8),
        (64, 128, 128, 4, 4, 8),
        (64, 64, 128, 4, 4, 8),
    ]
    if _without_tensor_cores(problem, hardware):
        sizes = [(64, 64, 8), (128, 64, 8), (64, 128, 8), (32, 64, 4), (16, 64, 4)]
        shapes = [(m, n, FLOAT32_BLOCK_K, warps, 3, 8) for m, n, warps in sizes]
    elif across and problem.m <= 64:
        shapes = [(64, 256, 64, 4, 4, 1), (64, 128, 128, 4, 4, 1), (64, 64, 128, 4, 5, 1), *shapes[:2]]
    elif problem.shard_rows <= 64 and not across:
        shapes = [shapes[3], shapes[4], (16, 64, 128, 4, 5, 1), *shapes[:3]]
    elif hardware.backend == "rocm" and not across:
        shapes = [(256, 256, 32, 8, 2, 4), (256, 128, 64, 8, 2, 8), *shapes, (256, 256, 64, 8, 2, 4)]
    elif not across and _saves_a_wave(problem, hardware.processors - comm):
        shapes = [(128, TWO_PRODUCTS, 64, 8, 3, 8), *shapes]
    if hardware.backend == "cuda" and problem.dtype != "fp32":
        shapes.sort(key=lambda shape: _time_of(problem, hardware.processors - comm, shape[0], shape[1], across))
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m")
    order = dict.fromkeys([*shapes[:3], *((*shape[:5], 1) for shape in shapes[:3]), *shapes[3:]])
    cut = [{name: min(value, int(max(tiles[name]))) for name, value in zip(names, shape, strict=True)} for shape in order]
    fitting = [tile for tile in (_made_to_fit(problem, hardware, shape) for shape in cut) if tile]
    different = {tuple(tile.values()): tile for tile in fitting}
    rest = {name: tiles[name][0] for name in ("loads", *_compile_options(problem, hardware))}
    return [tile | rest for tile in different.values()]


def _made_to_fit(problem: AllGatherGemm, hardware: Hardware, tile: dict[str, int]) -> dict[str, Value]:
    """The tile with as many stages as fit in shared memory, else with a smaller block of K; empty if nothing fits."""
    for k in (size for size in (tile["block_k"], 64, 32) if size <= tile["block_k"]):
        for stages in range(tile["num_stages"], 1, -1):
            if _pipeline_fits(problem, hardware, tile["block_m"], tile["block_n"], k, stages):
                return {**tile, "block_k": k, "num_stages": stages}
    return {}


def seeds_of(
    problem: AllGatherGemm, hardware: Hardware, variant: str, extras: list[dict[str, Value]], shapes: int
) -> tuple[Config, ...]:
    """The default (first tiles with first extras), then the other extras, then the first `shapes` other tiles.

    Where the extras include splits, `best_splits` chooses them per tile. The last seeds use its choice for a lower cost of parts.
    """
    across = any(extra.get("across") for extra in extras)
    comm = min(int(extra.get("comm", 0)) for extra in extras)
    tiles = _tile_seeds(problem, hardware, across=across, comm=comm)
    pairs = [(tiles[0], extra) for extra in extras] + [(tile, extras[0]) for tile in tiles[1 : 1 + shapes]]
    choices = split_parameters(problem, hardware)["splits"]

    def joined(values: dict[str, Value], cost: float) -> Config:
        if "splits" in values:
            number = count_tiles(problem, int(values["block_m"]), int(values["block_n"]), int(values.get("across", 0)))
            possible = choices if values["block_n"] != TWO_PRODUCTS else choices[:1]
            values = values | {"splits": best_splits(number, hardware.processors, possible, cost)}
        return Config.of(variant, values)

    high, low = COSTS_OF_PARTS
    sizes = {(tile["block_m"], tile["block_n"]): tile for tile in reversed(tiles[: 1 + shapes])}
    cheap = [joined(tile | extras[0], low) for tile in reversed(sizes.values())]
    return tuple(dict.fromkeys([joined(tile | extra, high) for tile, extra in pairs] + cheap))


def comm_programs(hardware: Hardware) -> tuple[int, ...]:
    """Choices for the number of communicating programs; the others compute."""
    return powers_of_two(1, min(64, hardware.processors // 2))


def sending(problem: AllGatherGemm, hardware: Hardware) -> dict[str, tuple[Value, ...]]:
    """How programs of the GEMM's own kernel, or of one beside it, move shards."""
    groups = {**k_group_parameters(problem), "comm": comm_programs(hardware), "pieces": (1, 2, 4, 8, 16)}
    return order_parameters(problem) | chunk_parameters(problem) | groups


def for_dies(space: VariantSpace, problem: AllGatherGemm, hardware: Hardware, *, sends: bool = False) -> VariantSpace:
    """Adds the parameter `dies`: the tiles of a wave are split among that many dies; 1 ignores dies. Only on AMD, with A sharded
    along M.

    Where the kernel itself `sends` pieces, `comm_dies` splits those pieces among dies in the same way. `signals` says whether the
    programs of a die signal together or one by one. Only the last seed uses these parameters: whether they help depends on the
    shape.
    """
    if hardware.backend != "rocm" or problem.shard != "m" or hardware.dies == 1:
        return space
    choices: dict[str, tuple[Value, ...]] = {"dies": (1, hardware.dies)}
    if sends:
        choices |= {"comm_dies": (1, hardware.dies), "signals": ("each", "die")}
    whole = Constraint(
        ("splits", "dies"), lambda splits, dies: splits == 1 or dies == 1, "tiles in parts go to whichever program is free"
    )
    least, most = ({name: values[at] for name, values in choices.items()} for at in (0, 1))
    first = space.seeds[0]
    last: dict[str, Value] = {"splits": 1} if "splits" in space.parameters else {}
    seeds = [Config.of(seed.variant, seed.values | least) for seed in space.seeds]
    seeds.append(Config.of(first.variant, first.values | last | most))
    return replace(
        space,
        parameters=space.parameters | choices,
        constraints=(*space.constraints, *([whole] if last else ())),
        seeds=tuple(seeds),
    )


bsp = scaled.bsp


def scaled_decomposed(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Products of e4m3 while A is gathered with its scales."""
    if problem.dtype != "e4m3":
        return None
    comms, products = comm_programs(hardware), scaled.choices(problem, problem.m, hardware)
    ways: tuple[Value, ...] = ("one", "two") if problem.world_size > 1 else ("one",)
    orders = (("one", 32, 0), ("two", 16, 0), ("one", 32, 1), ("two", 0, 0), ("one", 64, 0), ("two", 8, 0), ("one", 32, -1))
    seeds = [
        Config.of("scaled_decomposed", products[min(at, len(products) - 1)], products=how, comm=min(comm, comms[-1]))
        for how, comm, at in orders
    ]
    ordered = Constraint(
        ("products", "comm"),
        lambda how, comm: how != "one" or comm > 0 or problem.scales != "block",
        "copy engines do not put the scales of blocks in the order of one product",
    )
    parameters: dict[str, tuple[Value, ...]] = {"products": ways, "comm": (0, *comms)}
    parameters |= scaled.parameters(problem, problem.m, hardware)
    return VariantSpace("scaled_decomposed", parameters, (ordered, scaled.whole()), tuple(dict.fromkeys(seeds)))


def scaled_packets(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Few rows of e4m3. A part of B is loaded while words are under way."""
    if problem.dtype != "e4m3" or problem.m > MOST_ROWS:
        return None
    warm: tuple[Value, ...] = (0, 8, 16, 32) if hardware.backend == "cuda" else (0,)
    middle = warm[min(2, len(warm) - 1)]
    products = scaled.choices(problem, problem.m, hardware, library=False)
    most: tuple[Value, ...] = (1, 2) if hardware.backend == "cuda" else (1,)
    together = Constraint(
        ("product", "per_processor"),
        lambda name, count: count * scaled.shared_bytes(name) <= hardware.shared_memory or count == 1,
        "programs that wait for each other do not fit on the processors together",
    )
    parameters = scaled.parameters(problem, problem.m, hardware, library=False) | {"warm": warm, "per_processor": most}
    space = VariantSpace("scaled_packets", parameters, (together,))
    ways = itertools.product(products[:4], most, (0, middle))
    seeds = [Config.of("scaled_packets", choice, warm=size, per_processor=count) for choice, count, size in ways]
    return replace(space, seeds=tuple(seed for seed in dict.fromkeys(seeds) if space.why_not(seed) is None))


def copy_engine(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Large shards get a seed that sends halves, on the first of which tiles can start. A chunk costs 5 us."""
    if problem.weight != "nk" or problem.dtype == "e4m3":
        return None
    orders, chunks = order_parameters(problem), chunk_parameters(problem)
    rows = chunks["chunk_rows"]
    whole: dict[str, Value] = {"order": orders["order"][0], "chunk_rows": rows[-1], "streams": 1, "splits": 1}
    halves = [whole | {"chunk_rows": rows[-2]}] if problem.shard_rows >= 2 * LEAST_HALF else []
    space = VariantSpace(
        "copy_engine",
        tile_parameters(problem, hardware)
        | orders
        | chunks
        | split_parameters(problem, hardware)
        | {"streams": powers_of_two(1, max(1, min(3, problem.world_size - 1)))},
        (*tile_constraints(problem, hardware), *split_constraints(problem, hardware)),
        seeds_of(problem, hardware, "copy_engine", [whole, whole | {"order": orders["order"][-1]}, *halves], 3),
    )
    return for_dies(space, problem, hardware)


def decomposed(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """GEMMs of the vendor's library. With shard k every row needs every shard, so there is a single GEMM. Comm 0 (the copy
    engines) is left out there, because it would need strided copies. With two ranks `two` equals `each`.
    """
    if problem.dtype == "e4m3":
        return None
    comms = comm_programs(hardware)
    exchange: Value = "each" if problem.world_size > 2 else "two"
    pieces: tuple[Value, ...] = tuple(PIECES) if problem.world_size > 1 else ()
    products: tuple[Value, ...] = tuple(dict.fromkeys(("two", exchange, *pieces, "one")))
    warm: tuple[Value, ...] = (0, 8, 16, 32) if hardware.backend == "cuda" and problem.weight == "nk" else (0,)
    most = int(warm[-1])
    seeds = [("one", 32, most), ("two", 0, 0), (exchange, 0, 0), ("one", 32, 0), (exchange, 8, 0), ("one", 64, most)]
    if problem.shard_rows >= 2 * LEAST_HALF:
        seeds[2:2] = [(way, 0, 0) for way in pieces]
    if problem.shard == "k":
        products, seeds = ("one",), [("one", 32, most), ("one", 64, 0)]
    choices = comms if problem.shard == "k" else (0, *comms)
    configs = [Config.of("decomposed", products=how, comm=min(comm, choices[-1]), warm=size) for how, comm, size in seeds]
    idle = Constraint(
        ("products", "comm", "warm"),
        lambda how, comm, size: size == 0 or (how == "one" and comm > 0),
        "only a kernel that gathers for one product brings B into the L2",
    )
    engines = Constraint(
        ("products", "comm"), lambda how, comm: how not in PIECES or comm == 0, "only copy engines send in pieces"
    )
    parameters: dict[str, tuple[Value, ...]] = {"products": products, "comm": choices, "warm": warm}
    return VariantSpace("decomposed", parameters, (idle, engines), tuple(dict.fromkeys(configs)))


def pull(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Only the GEMM has parameters, because nothing is sent."""
    if problem.weight != "nk" or problem.dtype == "e4m3":
        return None
    orders = order_parameters(problem)
    seeds = seeds_of(problem, hardware, "pull", [{"order": orders["order"][-1]}], 1)
    space = VariantSpace("pull", tile_parameters(problem, hardware) | orders, tile_constraints(problem, hardware), seeds)
    return for_dies(space, problem, hardware)


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


def push(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """If a shard has few rows, a tile may span several shards."""
    if problem.weight != "nk" or problem.dtype == "e4m3":
        return None
    # With few rows in a shard, tiles across shards are worth a local copy of this rank's shard.
    across = int(problem.shard == "m" and problem.world_size > 1 and problem.shard_rows <= MOST_ROWS_ACROSS)
    highest = max(tile_parameters(problem, hardware)["block_m"])
    within = Constraint(
        ("block_m", "across"), lambda block, across: across == 1 or block <= highest, "the tile is higher than a shard"
    )
    firsts = [extra | {"across": across, "splits": 1} for extra in extras(problem, hardware)]
    space = VariantSpace(
        "push",
        tile_parameters(problem, hardware, across=across == 1)
        | sending(problem, hardware)
        | split_parameters(problem, hardware)
        | {"across": tuple(range(across + 1))},
        (*tile_constraints(problem, hardware), *split_constraints(problem, hardware, "across"), within),
        seeds_of(problem, hardware, "push", firsts, 5),
    )
    return for_dies(space, problem, hardware, sends=True)


WORD_BYTES = 4
HAS_PUSH_WORDS = "cuda:90"
"""The target that has `push_words`, which loads blocks of B while words arrive. `push_packets` is not searched there."""
PACKET_PIECES = (1024, 2048)
"""Words polled together: at least one per thread, since Triton may load a smaller tile twice."""
WIDEST = 128
"""Most columns of a tile. With few rows, many narrow tiles are needed to occupy the processors."""
HIGHEST = 128
"""Most rows of a seed's tile."""
SHAPES = ((64, 128, 4, 4), (32, 128, 5, 4), (128, 64, 4, 4), (64, 64, 5, 4), (128, 128, 3, 8))
"""Seeds: columns of a tile, K per step, stages, warps. A tile has as many rows as the problem, at most HIGHEST. It is narrow, so
that every processor reads a share of B.
"""


def push_packets(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """None for many rows, for shards that are not whole words, and where the warp-specialized `push_words` exists."""
    whole = problem.shard_cols * problem.item_size % WORD_BYTES == 0 and problem.weight == "nk" and problem.dtype != "e4m3"
    if problem.m > MOST_ROWS or not whole or hardware.target == HAS_PUSH_WORDS:
        return None
    product = replace(problem, shard="m", world_size=1)  # it starts when all of A is there, so owners of rows do not matter
    tiles = tile_parameters(product, hardware)
    allowed: dict[str, tuple[Value, ...]] = {
        **tiles,
        "block_n": tuple(n for n in tiles["block_n"] if int(n) <= WIDEST),
        "group_m": (1, 8),
        **split_parameters(product, hardware),
        "piece": PACKET_PIECES,
    }
    constraints = (*tile_constraints(product, hardware), *split_constraints(product, hardware))
    space = VariantSpace("push_packets", allowed, constraints)
    high = min(HIGHEST, int(tiles["block_m"][-1]))
    firsts: list[dict[str, Value]] = [{"block_m": high, "piece": piece} for piece in PACKET_PIECES]
    return with_narrow_tiles(space, hardware, lambda m, n: count_tiles(product, m, n), SHAPES, firsts)


def with_narrow_tiles(
    space: VariantSpace, hardware: Hardware, count: Callable[[int, int], int], shapes: Sequence[tuple[int, int, int, int]],
    firsts: Sequence[dict[str, Value]], *, shallower: bool = True,
) -> VariantSpace:  # fmt: skip
    """Adds seeds: tiles of these shapes with split-K or without it, whichever takes fewer waves. `firsts` are values that come up
    one after the other, and `count` counts the tiles of a call. With `shallower` a tile has as many stages as fit.
    """
    allowed = space.parameters
    seeds: dict[Config, None] = {}
    for first in firsts:
        for n, k, stages, warps in shapes:
            values = {name: choices[0] for name, choices in allowed.items()} | first
            values |= {"block_n": min(n, int(allowed["block_n"][-1])), "block_k": min(k, int(allowed["block_k"][-1]))}
            values |= {"num_warps": warps} if warps in allowed["num_warps"] else {}
            number = count(int(values["block_m"]), int(values["block_n"]))
            values["splits"] = best_splits(number, hardware.processors, allowed["splits"], COSTS_OF_PARTS[1])
            depths = [depth for depth in reversed(allowed["num_stages"]) if int(depth) <= stages]
            configs = (Config.of(space.variant, values | {"num_stages": depth}) for depth in depths[: None if shallower else 1])
            seeds |= dict.fromkeys([config for config in configs if space.why_not(config) is None][:1])
    return replace(space, seeds=tuple(seeds))


BLOCKS_N = tuple(sorted({*BLOCKS_OF_B, *itertools.chain(*BLOCKS_BESIDE_A.values())}))
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
PUSH_SPECIALIZED_STAGES = (2, 3, 4, 5, 6, 7, 8)
BARRIER_BYTES = 1024
"""Shared memory for the barriers of 32 K groups and eight stages."""
STALLS = 1.12
"""Time of a tile's main loop over the time of its matrix products alone. Measured on one H200."""
BYTES = 60
"""Bytes per cycle that a processor loads at best. Measured on one H200."""
CYCLES_OF_A_TILE = 6000
"""Cycles of a tile's first load and last store, which nothing hides. Measured on one H200."""
SCALED_TOGETHER, SCALED_WIDEST = 192, 256
"""Most columns of a tile of e4m3 whose parts are multiplied together: groups keep the sums of a strip of K beside those of all
strips. A wider tile has two parts, one after the other.
"""
COLUMNS_OF_A_GROUP = 512
"""Fewest columns of K per signal: a signal costs a sending processor about 3 us, while others go on sending."""


def have_roles(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether the warp-specialized GEMM applies: it needs Hopper's instructions, equal shards, and TMA for all matrices."""
    whole = problem.shard == "m" and problem.shard_rows * problem.world_size == problem.m
    aligned = problem.item_size == 2 and problem.k % 8 == 0 and problem.n % 8 == 0 and problem.weight == "nk"
    return whole and aligned and hardware.target == "cuda:90" and problem.world_size <= MOST_RANKS


def push_specialized_shared_bytes(block_m: int, block_n: int, stages: int, boxes: int) -> int:
    """Lower bound of the kernel's shared memory: operand buffers, staged output, boxes, barriers."""
    x, y = sides(block_m, block_n)
    elements = stages * (x + y) * BLOCK_K + x * parts_of(y)[0] + boxes * GROUP_ROWS * BLOCK_K
    return 2 * elements + BARRIER_BYTES


def _fits(hardware: Hardware, block_m: int, block_n: int, stages: int, boxes: int) -> bool:
    return push_specialized_shared_bytes(block_m, block_n, stages, boxes) <= hardware.shared_memory


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


def _push_specialized_tile_seeds(
    problem: AllGatherGemm, hardware: Hardware, suits: Callable[[int, int], bool], boxes: int = 1
) -> list[dict[str, Value]]:
    """Tiles sorted by `time_of`, each with as many stages as fit."""
    seeds = []
    for block_m, block_n in itertools.product(_blocks_of_a(problem), BLOCKS_N):
        if suits(block_m, block_n) and not _lies_across(problem, block_m, block_n):
            stages = max(number for number in PUSH_SPECIALIZED_STAGES if _fits(hardware, block_m, block_n, number, boxes))
            seeds.append((time_of(problem, hardware.processors, block_m, block_n), block_m, block_n, stages))
    return [{"block_m": m, "block_n": n, "num_stages": stages} for _, m, n, stages in sorted(seeds)]


def push_specialized(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """The space of the variant, or None where it does not apply."""
    return _specialized("push_specialized", problem, hardware, is_a_tile, BY_WORDS)


def scaled_specialized(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """That of `push_specialized` for words of two codes, which take the time of numbers of 16 bits. X is a block of A, and some
    columns travel as words, with the scales.
    """
    if problem.dtype != "e4m3" or problem.operand != "e4m3":
        return None
    columns = scaled.BLOCKS_OF_ONE_SCALE if problem.scales == "block" else BLOCKS_N

    def suits(block_m: int, block_n: int) -> bool:
        whole = block_n <= SCALED_TOGETHER or block_n == SCALED_WIDEST
        return block_n in BLOCKS_BESIDE_A.get(block_m, ()) and whole and block_n in columns

    return _specialized("scaled_specialized", as_words(problem), hardware, suits, BY_WORDS[1:])


def _specialized(
    variant: str, problem: AllGatherGemm, hardware: Hardware, suits: Callable[[int, int], bool], by_words: tuple[int, ...]
) -> VariantSpace | None:
    """A warp-specialized GEMM of tiles that it `suits`."""
    if problem.shard_rows % GROUP_ROWS or not have_roles(problem, hardware):
        return None
    orders = order_parameters(problem)["order"]
    whole = power_of_two(problem.shard_rows)
    groups = powers_of_two(1, max(1, min(MOST_K_GROUPS, problem.shard_cols // K_ALIGNMENT)))
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": _blocks_of_a(problem),
        "block_n": BLOCKS_N,
        "num_stages": PUSH_SPECIALIZED_STAGES,
        "group_m": (1, 4, 8),
        "order": orders,
        "chunk_rows": powers_of_two(GROUP_ROWS, whole),
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
            lambda m, n, stages, boxes: not suits(m, n) or _fits(hardware, m, n, stages, boxes),
            "the pipeline does not fit in shared memory",
        ),
    )
    if not parameters["by_words"] or not any(itertools.starmap(suits, itertools.product(parameters["block_m"], BLOCKS_N))):
        return None
    values = _push_specialized_seeds(problem, hardware, orders, parameters, suits)
    if variant != "push_specialized":  # no search has said yet which tiles are fast: different ones come first
        firsts = {(value["block_m"], value["block_n"]): value for value in reversed(values)}
        values.sort(key=lambda value: firsts[value["block_m"], value["block_n"]] is not value)
    return VariantSpace(variant, parameters, constraints, tuple(Config.of(variant, value) for value in values))


def _push_specialized_seeds(
    problem: AllGatherGemm, hardware: Hardware, orders: tuple[Value, ...], parameters: dict[str, tuple[Value, ...]],
    suits: Callable[[int, int], bool],
) -> list[dict[str, Value]]:  # fmt: skip
    """Values of seeds. K groups are of whole shards where there is one wave, of a quarter of their rows where more."""
    groups, chunks = parameters["k_groups"], parameters["chunk_rows"]
    whole = int(chunks[-1])
    tiles = _push_specialized_tile_seeds(problem, hardware, suits)
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
        values.insert(1, _push_specialized_tile_seeds(problem, hardware, suits, boxes=2)[0] | defaults | {"boxes": 2})
    # A longer search on two H200 preferred slower boxes at nine of eleven shapes, more words at four, and one stage fewer at
    # three.
    more = next((columns for columns in parameters["by_words"] if int(columns) >= 2 * by_words > 0), by_words)
    calm = [value | {"pace": SLOWER, "by_words": more} for value in values[:both]]
    values[2:2] = [*calm, calm[-1] | {"num_stages": max(PUSH_SPECIALIZED_STAGES[0], int(calm[-1]["num_stages"]) - 1)}]
    return list({tuple(value.items()): value for value in values}.values())


def push_two_kernel(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """`beside`: whether the two kernels run concurrently or one after the other."""
    if problem.weight != "nk" or problem.dtype == "e4m3":
        return None
    firsts: list[dict[str, Value]] = [extras(problem, hardware)[0] | {"beside": beside} for beside in (1, 0)]
    space = VariantSpace(
        "push_two_kernel",
        tile_parameters(problem, hardware) | sending(problem, hardware) | {"beside": (0, 1)},
        tile_constraints(problem, hardware),
        seeds_of(problem, hardware, "push_two_kernel", firsts, 0),
    )
    return for_dies(space, problem, hardware)


MOST_ROWS = 256
"""Most rows of all shards together. At 256 `push_specialized` is already faster. Measured like PACE."""
BLOCKS_K = (64, 128)
LOW = 32
"""Most rows of a tile whose products take little time compared with a barrier per 64 columns. Measured like PACE."""
PUSH_WORDS_STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
USUAL_COLUMNS = 768
"""Columns of B to prefetch; more delays the LL words. Measured on two H200 that sent as much as four do."""
K_GROUPS = (1, 2, 4, 8)
USUAL_K_GROUPS = (4, 2, 1)


def push_words_shared_bytes(block_m: int, block_n: int, block_k: int, stages: int) -> int:
    """Lower bound of the kernel's shared memory: operand buffers, staged output, barriers."""
    x, y = sides(block_m, block_n)
    return 2 * (stages * (x + y) * block_k + x * parts_of(y)[0]) + BARRIER_BYTES


def _divides(problem: AllGatherGemm, groups: int) -> bool:
    return groups == 1 or problem.shard_cols % (groups * K_ALIGNMENT) == 0


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
    if problem.m > MOST_ROWS or not have_roles(problem, hardware):
        return None
    blocks = [block for block in TILES_BY_WORDS if block // 2 < problem.m] or [min(TILES_BY_WORDS)]
    tiles = [(m, n) for m in blocks for n in TILES_BY_WORDS[m] if n in columns]
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
            lambda m, n, k, stages: (m, n) not in tiles or push_words_shared_bytes(m, n, k, stages) <= hardware.shared_memory,
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
        most = max(stages for stages in depths if push_words_shared_bytes(m, n, k, stages) <= hardware.shared_memory)
        values.append({"block_m": m, "block_n": n, "block_k": k, "num_stages": most, "k_groups": number})
    return values


TERAFLOPS, LINK_GBPS, MEMORY_GBPS, START_US = 650.0, 375.0, 4000.0, 8.0
"""Approximate rates of an H200, and the time of a launch with its first wait. The latency model learns the remaining error."""


def base_us(problem: AllGatherGemm) -> float:
    """The maximum of the times of GEMM, links and memory, plus START_US."""
    read = (problem.m + problem.n) * problem.k * problem.item_size
    return START_US + max(*_product_and_links_us(problem), read / (MEMORY_GBPS * 1e3))


def _product_and_links_us(problem: AllGatherGemm) -> tuple[float, float]:
    received = (problem.world_size - 1) * problem.shard_rows * problem.shard_cols * problem.item_size
    return 2e-6 * problem.m * problem.n * problem.k / TERAFLOPS, received / (LINK_GBPS * 1e3)


def traits(problem: AllGatherGemm, hardware: Hardware, config: Config) -> dict[str, float]:
    """Feature values by name; only a few for a config without tiles."""
    values = scaled.with_tiles(config.values)
    product, links = _product_and_links_us(problem)
    features = {"product_share": product / base_us(problem), "links_share": links / base_us(problem)}
    if "block_m" not in values:
        return features
    m, n, k = int(values["block_m"]), int(values["block_n"]), int(values.get("block_k", 64))
    splits, comm = int(values.get("splits", 1)), int(values.get("comm", 0))
    tiles = count_tiles(problem, m, n, int(values.get("across", 0)))
    workers = max(1, hardware.processors - comm)
    waves = ceil_div(tiles, workers)
    held = (m + n) * k * problem.item_size * int(values.get("num_stages", 1))
    return features | {
        "tiles": tiles,
        "waves": tiles / workers,
        "tail": waves - tiles / workers,
        "filled": tiles / (waves * workers),
        "split_tail": (tiles % workers) * splits / workers,
        "wave_us": 2e-6 * waves * workers * m * n * problem.k / TERAFLOPS / base_us(problem),
        "shared_bytes": held / hardware.shared_memory,
        "accumulators": m * n / (32 * int(values.get("num_warps", 8))),
        "steps": problem.k / k,
        "reads": (problem.k / m + problem.k / n) / problem.k,
        "chunks": problem.shard_rows / int(values["chunk_rows"]) if "chunk_rows" in values else -1.0,
        "comm_share": comm / hardware.processors,
    }
