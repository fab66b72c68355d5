"""Search spaces of All-Gather + GEMM but for those of warps with roles, one function per variant; before them what they share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from autotax.core.config import Config, Value
from autotax.core.problem import power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.kernels.tiling import K_ALIGNMENT, PIECES
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces import gemm_tiles as gemm
from autotax.spaces import scaled

MOST_CHUNKS = 64
MOST_ROWS_ACROSS = 128


def chunk_parameters(problem: AllGatherGemm) -> dict[str, tuple[Value, ...]]:
    """Rows per flag: from 16 (or more, to keep the flags of a shard within MOST_CHUNKS) to the whole shard."""
    whole = max(16, power_of_two(problem.shard_rows))
    return {"chunk_rows": powers_of_two(max(16, whole // MOST_CHUNKS), whole)}


def k_group_parameters(problem: AllGatherGemm) -> dict[str, tuple[Value, ...]]:
    """Number of K groups, which a tile awaits one by one. Each group is a range of columns, in whole blocks of K_ALIGNMENT."""
    return {"k_groups": powers_of_two(1, max(1, min(8, problem.shard_cols // K_ALIGNMENT)))}


def sending(problem: AllGatherGemm, hardware: Hardware) -> dict[str, tuple[Value, ...]]:
    """How programs of the GEMM's own kernel, or of one beside it, move shards."""
    groups = {**k_group_parameters(problem), "comm": gemm.comm_programs(hardware), "pieces": (1, 2, 4, 8, 16)}
    return gemm.order_parameters(problem) | chunk_parameters(problem) | groups


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


def multiplies_own_rows(problem: AllGatherGemm) -> bool:
    """Whether ranks may multiply their own rows by themselves: all ranks have some. With shard k every row needs every shard.

    Other ranks need not wait for a rank without rows. Call behind call they run ahead and hide their transfer. A product before
    the transfer then looks free, although it delays the transfer.
    """
    return problem.m > (problem.world_size - 1) * problem.shard_rows and problem.world_size > 1


def scaled_decomposed(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Products of e4m3 while A is gathered with its scales."""
    if problem.dtype != "e4m3":
        return None
    comms, products = gemm.comm_programs(hardware), scaled.choices(problem, problem.m, hardware, roles=True)
    ways: tuple[Value, ...] = ("one", "two") if multiplies_own_rows(problem) else ("one",)
    orders = (("one", 32, 0), ("two", 16, 0), ("one", 32, 1), ("two", 0, 0), ("one", 64, 0), ("two", 8, 0), ("one", 32, -1))
    seeds = [
        Config.of("scaled_decomposed", products[min(at, len(products) - 1)], products=how, comm=min(comm, comms[-1]))
        for how, comm, at in orders
        if how in ways
    ]
    ordered = Constraint(
        ("products", "comm"),
        lambda how, comm: how != "one" or comm > 0 or problem.scales != "block",
        "copy engines do not put the scales of blocks in the order of one product",
    )
    parameters: dict[str, tuple[Value, ...]] = {"products": ways, "comm": (0, *comms)}
    parameters |= scaled.parameters(problem, problem.m, hardware, roles=True)
    return VariantSpace("scaled_decomposed", parameters, (ordered, scaled.whole()), tuple(dict.fromkeys(seeds)))


def scaled_packets(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """Few rows of e4m3. A part of B is loaded while words are under way."""
    if problem.dtype != "e4m3" or problem.m > gemm.MOST_ROWS:
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
    orders, chunks = gemm.order_parameters(problem), chunk_parameters(problem)
    rows = chunks["chunk_rows"]
    whole: dict[str, Value] = {"order": orders["order"][0], "chunk_rows": rows[-1], "streams": 1, "splits": 1}
    halves = [whole | {"chunk_rows": rows[-2]}] if problem.shard_rows >= 2 * gemm.LEAST_HALF else []
    space = VariantSpace(
        "copy_engine",
        gemm.tile_parameters(problem, hardware)
        | orders
        | chunks
        | gemm.split_parameters(problem, hardware)
        | {"streams": powers_of_two(1, max(1, min(3, problem.world_size - 1)))},
        (*gemm.tile_constraints(problem, hardware), *gemm.split_constraints(problem, hardware)),
        gemm.seeds_of(problem, hardware, "copy_engine", [whole, whole | {"order": orders["order"][-1]}, *halves], 3),
    )
    return for_dies(space, problem, hardware)


def decomposed(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """GEMMs of the vendor's library. With shard k comm 0 (the copy engines) is left out, because it would need strided copies.
    With two ranks `two` equals `each`.
    """
    if problem.dtype == "e4m3":
        return None
    comms = gemm.comm_programs(hardware)
    exchange: Value = "each" if problem.world_size > 2 else "two"
    products: tuple[Value, ...] = tuple(dict.fromkeys(("two", exchange, *PIECES, "one")))
    warm: tuple[Value, ...] = (0, 8, 16, 32) if hardware.backend == "cuda" and problem.weight == "nk" else (0,)
    most = int(warm[-1])
    seeds = [("one", 32, most), ("two", 0, 0), (exchange, 0, 0), ("one", 32, 0), (exchange, 8, 0), ("one", 64, most)]
    if problem.shard_rows >= 2 * gemm.LEAST_HALF:
        seeds[2:2] = [(way, 0, 0) for way in PIECES]
    if not multiplies_own_rows(problem):
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
    orders = gemm.order_parameters(problem)
    parameters = gemm.tile_parameters(problem, hardware) | orders
    seeds = gemm.seeds_of(problem, hardware, "pull", [{"order": orders["order"][-1]}], 1)
    return for_dies(VariantSpace("pull", parameters, gemm.tile_constraints(problem, hardware), seeds), problem, hardware)


def extras(problem: AllGatherGemm, hardware: Hardware) -> list[dict[str, Value]]:
    """16 to 32 comm programs saturate the links. A tile waits for few flags; K groups let it begin early."""
    orders, rows = gemm.order_parameters(problem)["order"], chunk_parameters(problem)["chunk_rows"]
    comms, groups = gemm.comm_programs(hardware), k_group_parameters(problem)["k_groups"]
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
    highest = max(gemm.tile_parameters(problem, hardware)["block_m"])
    within = Constraint(
        ("block_m", "across"), lambda block, across: across == 1 or block <= highest, "the tile is higher than a shard"
    )
    firsts = [extra | {"across": across, "splits": 1} for extra in extras(problem, hardware)]
    space = VariantSpace(
        "push",
        gemm.tile_parameters(problem, hardware, across=across == 1)
        | sending(problem, hardware)
        | gemm.split_parameters(problem, hardware)
        | {"across": tuple(range(across + 1))},
        (*gemm.tile_constraints(problem, hardware), *gemm.split_constraints(problem, hardware, "across"), within),
        gemm.seeds_of(problem, hardware, "push", firsts, 5),
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
    if problem.m > gemm.MOST_ROWS or not whole or hardware.target == HAS_PUSH_WORDS:
        return None
    product = replace(problem, shard="m", world_size=1)  # it starts when all of A is there, so owners of rows do not matter
    tiles = gemm.tile_parameters(product, hardware)
    allowed: dict[str, tuple[Value, ...]] = {
        **tiles,
        "block_n": tuple(n for n in tiles["block_n"] if int(n) <= WIDEST),
        "group_m": (1, 8),
        **gemm.split_parameters(product, hardware),
        "piece": PACKET_PIECES,
    }
    constraints = (*gemm.tile_constraints(product, hardware), *gemm.split_constraints(product, hardware))
    space = VariantSpace("push_packets", allowed, constraints)
    high = min(HIGHEST, int(tiles["block_m"][-1]))
    firsts: list[dict[str, Value]] = [{"block_m": high, "piece": piece} for piece in PACKET_PIECES]
    return gemm.with_narrow_tiles(space, hardware, partial(gemm.count_tiles, product), SHAPES, firsts)


def push_two_kernel(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """`beside`: whether the two kernels run concurrently or one after the other."""
    if problem.weight != "nk" or problem.dtype == "e4m3":
        return None
    firsts: list[dict[str, Value]] = [extras(problem, hardware)[0] | {"beside": beside} for beside in (1, 0)]
    space = VariantSpace(
        "push_two_kernel",
        gemm.tile_parameters(problem, hardware) | sending(problem, hardware) | {"beside": (0, 1)},
        gemm.tile_constraints(problem, hardware),
        gemm.seeds_of(problem, hardware, "push_two_kernel", firsts, 0),
    )
    return for_dies(space, problem, hardware)
