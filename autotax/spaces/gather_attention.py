"""Search spaces of gather + attention, one function per variant."""

from __future__ import annotations

from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.problem import power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware, lanes
from autotax.operators.gather_attention import GatherAttention

LIBRARIES: dict[str, tuple[Value, ...]] = {"cuda": ("cudnn", "flash"), "rocm": ("flash",), "cpu": ("cpu",)}
"""The attention of torch: cuDNN's, the flash attention that torch brings along, and that for CPUs."""

ORDERS = ("block_first", "head_first")
"""The next block of queries is the same block of the next head, or the next block of the same head."""
SQUARES = (1, 2, 4)
PIECES = (1, 2, 4)
"""More would be exchanged in messages that are too short for the links. Attention to fewer heads at a time takes longer, too."""
ACCUMULATORS = 160
"""Most float32 numbers that a thread holds: its part of the output and of the scores."""


def _by_library(variant: str, problem: GatherAttention, hardware: Hardware, tokens: int) -> VariantSpace:
    """Parameters of variants with the vendor's attention: the library, of which cuDNN's has no windows; and the rows of squares
    into which the attention of `tokens` tokens to themselves is cut. Keys and values of a head that fit in the L2 gain nothing by
    that.
    """

    def fits(rows: int) -> bool:
        return tokens // rows * (problem.head_dim + problem.value_dim) * problem.item_size <= hardware.l2_bytes

    libraries = tuple(library for library in LIBRARIES[hardware.backend] if library != "cudnn" or not problem.window)
    whole = problem.mask == "none" or problem.windowed or fits(1)
    squares = tuple(rows for rows in SQUARES if rows == 1 or (not whole and tokens % rows == 0))
    fitting = next(filter(fits, squares), 1)
    seeds = tuple(Config.of(variant, library=library, squares=fitting) for library in libraries)
    return VariantSpace(variant, {"library": libraries, "squares": squares}, (), seeds, former={"squares": 1})


def bsp(problem: GatherAttention, hardware: Hardware) -> VariantSpace:
    """See `_by_library`."""
    return _by_library("bsp", problem, hardware, problem.shard_len)


def decomposed(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """None for one rank, which has all keys."""
    if problem.world_size == 1:
        return None
    return _sent_by_streams(_by_library("decomposed", problem, hardware, problem.shard_len), problem)


def _sent_by_streams(space: VariantSpace, problem: GatherAttention) -> VariantSpace:
    """A space with the parameter `streams`: copies to so many peers go at once, over links of their own in a full mesh."""
    seeds = tuple(Config.of(space.variant, seed.values | {"streams": 1}) for seed in space.seeds)
    streams: tuple[Value, ...] = powers_of_two(1, max(1, min(4, problem.world_size - 1)))
    return replace(space, parameters=space.parameters | {"streams": streams}, seeds=seeds, former={**space.former, "streams": 1})


def ring(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """None for one rank, and for two, which `decomposed` serves alike."""
    return _by_library("ring", problem, hardware, problem.shard_len) if problem.world_size > 2 else None


def heads(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """None where the ranks do not divide the heads. Parameter `pieces`: parts of a rank's heads, each exchanged beside attention
    to the one before.
    """
    own, rest = divmod(problem.kv_heads, problem.world_size)
    if rest or problem.world_size == 1:
        return None
    plain = _by_library("heads", problem, hardware, problem.seq_len)
    parameters = plain.parameters | {"pieces": tuple(count for count in PIECES if own % count == 0)}
    seeds = [Config.of("heads", config.values | {"pieces": n}) for config in plain.seeds for n in parameters["pieces"][:2]]
    return replace(plain, parameters=parameters, seeds=tuple(dict.fromkeys(seeds)), former={**plain.former, "pieces": 1})


def _by_roles(problem: GatherAttention, hardware: Hardware) -> bool:
    """Whether warps can have roles: on Hopper, where chunks are whole tiles of 128 queries, and heads have 64 or 128 elements, or
    those of K 192 and those of V 128.
    """
    whole = problem.chunk_len % 128 == 0 and (problem.head_dim, problem.value_dim) in ((64, 64), (128, 128), (192, 128))
    return hardware.target == "cuda:90" and whole and problem.world_size > 1


def copy_engine(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """See `_by_roles`. Parameter `grid`: programs that take one tile after the other, or a program for each tile."""
    if not _by_roles(problem, hardware):
        return None
    parameters: dict[str, tuple[Value, ...]] = _of_tiles(problem) | {"grid": ("processors", "tiles")}
    seeds = [
        Config.of("copy_engine", block_n=128, num_stages=2, order=order, grid=grid)
        for order in ORDERS
        for grid in ("processors", "tiles")
    ]
    space = VariantSpace("copy_engine", parameters, (_in_shared_memory(problem, hardware),), tuple(seeds))
    return _sent_by_streams(space, problem)


def push_specialized(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """See `_by_roles`. For two ranks that see keys of each other. Parameters: boxes in flight, tokens that share a flag.

    There is no room for boxes beside keys of 192 elements. All keys are sent, which windows do not need.
    """
    one_sided = problem.mask == "causal" and problem.layout == "contiguous"
    if not _by_roles(problem, hardware) or problem.world_size != 2 or one_sided or problem.v_dim or problem.window:
        return None
    own: dict[str, tuple[Value, ...]] = {
        "boxes": (1, 2, 4),
        "chunk": tuple(size for size in (128, 256, 512, 1024) if problem.shard_len % size == 0),
    }
    seeds = [
        Config.of("push_specialized", block_n=128, num_stages=2, order="block_first", boxes=boxes, chunk=own["chunk"][:2][-1])
        for boxes in (2, 4, 1)
    ]
    fits = _in_shared_memory(problem, hardware, "boxes")
    return VariantSpace("push_specialized", _of_tiles(problem) | own, (fits,), tuple(seeds))


def _of_tiles(problem: GatherAttention) -> dict[str, tuple[Value, ...]]:
    return {"block_n": (128, 64) if problem.mask == "none" else (128,), "num_stages": (2, 3), "order": ORDERS}


def _in_shared_memory(problem: GatherAttention, hardware: Hardware, *boxes: str) -> Constraint:
    """A tile of queries, the blocks of keys and values, the output of one group on its way, and boxes that are sent."""

    def fits(block_n: int, stages: int, sent: int = 0) -> bool:
        key, value = problem.head_dim, problem.value_dim
        elements = 128 * key + 64 * value + stages * block_n * (key + value) + sent * 64 * 64
        return elements * problem.item_size + 1024 <= hardware.shared_memory

    return Constraint(("block_n", "num_stages", *boxes), fits, "queries, keys and boxes do not fit in shared memory")


def push(problem: GatherAttention, hardware: Hardware) -> VariantSpace | None:
    """None for one rank, and unless heads of V, and what those of K have more, are powers of two from 16 on."""
    dims = problem.value_dim, problem.head_dim - problem.value_dim
    if any(dim != power_of_two(dim) or dim < 16 for dim in dims if dim) or problem.world_size == 1:
        return None
    gpu = hardware.on_gpu
    most = max(16, power_of_two(problem.chunk_len))
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": tuple(size for size in (64, 128) if size <= most) or (16,) if gpu else (16, 32),
        "block_n": tuple(size for size in (32, 64, 128) if size <= most) or (16,) if gpu else (16, 32),
        "num_warps": (4, 8) if gpu else (4,),
        "num_stages": (1, 2, 3, 4) if gpu else (2,),
        "order": ORDERS,
        "dies": tuple(dict.fromkeys((1, hardware.dies))),
        "comm": (4, 8, 16, 32, 64) if gpu else (1, 2),
        "piece": (32, 64, 128) if gpu else (16, 32),
        "group": (256, 512, 1024, 4096) if gpu else (32, 64),
        "loads": ("pointer",) if hardware.backend == "rocm" else ("tma",),
    }
    fits = Constraint(
        ("block_m", "block_n", "num_warps", "num_stages"),
        lambda m, n, warps, stages: not gpu or _fits(problem, hardware, m, n, warps, stages),
        "queries and keys do not fit in shared memory or registers",
    )
    ways = ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (16, 16, 4, 2))
    seeds = [
        Config.of(
            "push", block_m=m, block_n=n, num_warps=warps, num_stages=stages, order=order, dies=parameters["dies"][-1],
            comm=16 if gpu else 2, piece=64 if gpu else 32, group=1024 if gpu else 32, loads=parameters["loads"][0],
        )
        for order in ORDERS
        for m, n, warps, stages in (ways[1:] if problem.window or problem.v_dim else ways)  # the first would spill
        if m in parameters["block_m"] and n in parameters["block_n"]
    ]  # fmt: skip
    return VariantSpace("push", parameters, (fits,), tuple(seeds))


def _fits(problem: GatherAttention, hardware: Hardware, m: int, n: int, warps: int, stages: int) -> bool:
    """Whether Q and the blocks of K and V fit in shared memory, and the output and the scores in half of the registers."""
    key, value = problem.head_dim, problem.value_dim
    nbytes = (m * key + stages * n * (key + value)) * problem.item_size
    return nbytes <= hardware.shared_memory and m * (value + n) <= ACCUMULATORS * lanes(hardware) * warps
