"""Search spaces of All-Reduce + RMSNorm, one function per variant."""

from __future__ import annotations

import itertools

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import REGISTERS, Hardware, lanes
from autotax.operators.all_reduce_norm import AllReduceNorm
from autotax.spaces import scaled

MOST_WORDS = 1 << 21
"""Most words that a rank sends to another in one trip: 16 MiB."""
MOST_MULTIPLIED = 64
"""Most rows for `fused`, whose tiles have all of them."""
MOST_QUANTISED = 4
"""Most rows that every program of `scaled_fused` may quantise for itself, one after the other."""
BARRIERS = 1024
"""Bytes of shared memory beside the blocks of a pipeline."""
FEWEST_ROWS = 32
"""Fewest rows for `push`: with fewer, a flag costs more than the doubled bytes of words."""
MOST_HELD = 64
"""Most columns of a row per thread: each takes a register for its sum and some for the addends."""


def bsp(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace:
    """Parameters: rows per program and warps; behind a product of e4m3 also the product."""
    parameters: dict[str, tuple[Value, ...]] = {"rows": (1, 2, 4, 8), "num_warps": _warps(hardware)}
    held = _held(problem, hardware, "rows")
    seeds = [Config.of("bsp", rows=rows, num_warps=warps) for warps in (8, 16, 4) for rows in (1, 2)]
    plain = VariantSpace("bsp", parameters, (held,), tuple(seeds))
    return _behind_product("bsp", plain, problem, hardware) or plain


def one_shot(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """None behind a product of e4m3, which has `scaled_one_shot`."""
    return None if problem.front else _one_shot(problem, hardware)


def scaled_one_shot(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """`one_shot` behind a product of e4m3."""
    return _behind_product("scaled_one_shot", _one_shot(problem, hardware), problem, hardware)


def _one_shot(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """Parameters: the kind of words and the number of programs that share a row. None for many rows."""
    if problem.world_size == 1 or problem.m * problem.hidden * problem.item_size // 4 > MOST_WORDS:
        return None
    most = min(16, ceil_div(problem.hidden, 128), max(1, 4 * hardware.processors // problem.m))
    parameters: dict[str, tuple[Value, ...]] = {
        "words": ("blank", "epoch"),
        "split": powers_of_two(1, most),
        "num_warps": _warps(hardware),
        "per_processor": (1, 2, 4) if hardware.on_gpu else (1,),
    }
    splits = parameters["split"]
    # 2 H100: four programs a row win where rows are few, one where they are half as many as processors.
    few = [splits[min(2, len(splits) - 1)], splits[-1], splits[0]]
    tried = few if 4 * problem.m <= hardware.processors else [splits[0], splits[len(splits) // 2]]
    seeds = [
        Config.of("one_shot", words=words, split=split, num_warps=warps, per_processor=programs)
        for words in ("blank", "epoch")
        for split in dict.fromkeys(tried)
        for warps, programs in _resident(problem, hardware)
    ]
    return VariantSpace("one_shot", parameters, (_held(problem, hardware), _room(problem, hardware)), tuple(seeds))


def two_shot(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """None behind a product of e4m3, which has `scaled_two_shot`."""
    return None if problem.front else _two_shot(problem, hardware)


def scaled_two_shot(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """`two_shot` behind a product of e4m3."""
    return _behind_product("scaled_two_shot", _two_shot(problem, hardware), problem, hardware)


def _two_shot(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """Parameters: the kind of words. None for many rows. A rank sends to each other rank its part of the columns."""
    if problem.world_size == 1 or problem.m * problem.hidden * problem.item_size // (4 * problem.world_size) > MOST_WORDS:
        return None
    parameters: dict[str, tuple[Value, ...]] = {
        "words": ("blank", "epoch"),
        "num_warps": _warps(hardware),
        "per_processor": (1, 2, 4) if hardware.on_gpu else (1,),
    }
    seeds = [
        Config.of("two_shot", words=words, num_warps=warps, per_processor=programs)
        for words in ("blank", "epoch")
        for warps, programs in _resident(problem, hardware)
    ]
    return VariantSpace("two_shot", parameters, (_held(problem, hardware), _room(problem, hardware)), tuple(seeds))


def fused(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """Parameters: those of `one_shot` and of tiles of the product. Only for few rows of 16 bits behind a product."""
    few = problem.k and not problem.front and problem.m <= MOST_MULTIPLIED and problem.item_size == 2
    exchange = one_shot(problem, hardware)
    if not few or exchange is None:
        return None
    tma = hardware.backend == "cuda" and problem.k % 8 == 0
    parameters: dict[str, tuple[Value, ...]] = {
        **exchange.parameters,
        "block_n": (16, 32, 64, 128) if hardware.on_gpu else (16, 64),
        "block_k": (64, 128, 256, 512) if hardware.on_gpu else (32,),
        "num_stages": (2, 3, 4, 5, 6, 8) if hardware.on_gpu else (2,),
        "loads": ("pointer", "tma") if tma else ("pointer",),
        "weights": ("kept", "passing"),
        "columns": ("straight", "turned"),
    }
    rows = max(16, power_of_two(problem.m))

    def fits(n: int, k: int, stages: int, programs: int) -> bool:
        held = (stages - 1) * (rows + n) * k * problem.item_size  # these products take one block from registers
        return programs * (held + BARRIERS) <= hardware.shared_memory

    shared = Constraint(("block_n", "block_k", "num_stages", "per_processor"), fits, "the pipelines do not fit in shared memory")
    read = Constraint(
        ("loads", "weights"), lambda loads, weights: loads == "pointer" or weights == "kept", "only pointers load passing weights"
    )
    constraints = (_held(problem, hardware), _room(problem, hardware), shared, read)
    space = VariantSpace("fused", parameters, constraints)
    split = parameters["split"][min(2, len(parameters["split"]) - 1)]
    names = ("block_n", "block_k", "num_warps", "per_processor")
    ways = ((64, 128, 4, 1), (64, 256, 8, 1), (32, 256, 4, 2), (32, 512, 4, 2), (64, 128, 8, 1), (32, 64, 1, 1))
    reads = (("pointer", "passing", "turned"), ("pointer", "kept", "straight"), ("tma", "kept", "turned"))
    seeds = []
    for way, (loads, weights, columns) in itertools.product(ways, reads):
        near = {name: _nearest(parameters[name], value) for name, value in zip(names, way, strict=True)}
        rest = {"words": "blank", "split": split, "loads": loads, "weights": weights, "columns": columns}
        deep = (Config.of("fused", near | rest | {"num_stages": stages}) for stages in parameters["num_stages"][::-1])
        seeds += [config for config in deep if space.why_not(config) is None][:1]
    if not seeds:
        return None
    return VariantSpace("fused", parameters, constraints, tuple(dict.fromkeys(seeds)))


def scaled_fused(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """Parameters: those of `one_shot`, and of tiles of a product of e4m3. Only for few rows."""
    front, exchange = problem.front, _one_shot(problem, hardware)
    if front is None or exchange is None or problem.m > MOST_MULTIPLIED:
        return None
    rows = max(16, power_of_two(problem.m))
    parameters: dict[str, tuple[Value, ...]] = {
        **exchange.parameters,
        "num_warps": (4, 8) if hardware.backend == "cuda" else _warps(hardware),  # Hopper multiplies by groups of four
        "block_n": (64, 128) if hardware.on_gpu else (32,),
        "num_stages": (2, 3, 4, 5, 6, 8, 10) if hardware.backend == "cuda" else (2,),
        "splits": scaled.parameters(front, problem.m, hardware)["splits"],
        "loads": ("tma", "pointer") if hardware.backend == "cuda" else ("pointer",),
        "quantised": ("before", "within") if front.quantize != "none" and problem.m <= MOST_QUANTISED else ("before",),
    }

    def name(n: int, stages: int) -> str:
        return f"{rows}x{n}x{stages}x4"

    def fits(n: int, stages: int, programs: int) -> bool:
        return programs * scaled.shared_bytes(name(n, stages)) <= hardware.shared_memory

    shared = Constraint(("block_n", "num_stages", "per_processor"), fits, "the pipelines do not fit in shared memory")
    within = Constraint(
        ("loads", "quantised"), lambda loads, where: loads == "pointer" or where == "before", "pointers load such codes"
    )
    constraints = (_held(problem, hardware), _room(problem, hardware), shared, within)
    space = VariantSpace("scaled_fused", parameters, constraints)
    ways = list(dict.fromkeys([(parameters["loads"][0], "before"), ("pointer", parameters["quantised"][-1])]))
    split = parameters["split"][min(2, len(parameters["split"]) - 1)]
    seeds = []
    for n, warps, programs in ((64, 4, 1), (64, 8, 1), (64, 4, 2), (128, 8, 1), (128, 4, 2), (64, 8, 2), (64, 1, 1)):
        at_once = scaled.splits_at_once(name(n, 2), problem.m, problem.hidden, hardware)
        for splits, (loads, where) in itertools.product(dict.fromkeys((at_once, programs * at_once)), ways):
            values = {"block_n": n, "num_warps": warps, "per_processor": programs, "splits": splits}
            rest = {"words": "blank", "split": split, "loads": loads, "quantised": where}
            near = {key: _nearest(parameters[key], value) for key, value in values.items()} | rest
            deep = (Config.of("scaled_fused", near | {"num_stages": stages}) for stages in parameters["num_stages"][::-1])
            seeds += [config for config in deep if space.why_not(config) is None][:1]
    return VariantSpace("scaled_fused", parameters, constraints, tuple(dict.fromkeys(seeds))) if seeds else None


def push(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """None behind a product of e4m3, which has `scaled_push`."""
    return None if problem.front else _push(problem, hardware)


def scaled_push(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """`push` behind a product of e4m3."""
    return _behind_product("scaled_push", _push(problem, hardware), problem, hardware)


def _push(problem: AllReduceNorm, hardware: Hardware) -> VariantSpace | None:
    """Parameters: rows per block, how many blocks sending is ahead, one trip or two, and when flags are set. With two trips also
    which rank owns a block (`tiling.owner_of`). None for few rows.
    """
    if problem.world_size == 1 or (problem.m < FEWEST_ROWS and hardware.on_gpu):
        return None
    parameters: dict[str, tuple[Value, ...]] = {
        "shots": ("two", "one"),
        "rows": (1, 2, 4, 8, 16) if hardware.on_gpu else (1, 2),
        "ahead": (1, 2, 4, 64),
        "owners": ("turned", "straight"),
        "signals": ("at_once", "late"),
        "num_warps": _warps(hardware),
        "per_processor": (1, 2, 4) if hardware.on_gpu else (1,),
    }
    # 2 and 4 H200, 256 to 8192 rows: two shots are faster, also between two ranks.
    in_two = (
        (4, 1, "at_once", 8, 2), (1, 2, "late", 8, 2), (4, 2, "late", 8, 2), (2, 2, "late", 8, 2), (4, 1, "at_once", 16, 1),
        (2, 4, "late", 8, 2), (4, 2, "late", 16, 1), (8, 1, "late", 8, 2), (1, 2, "late", 16, 1),
    )  # fmt: skip
    in_one = ((2, 2, "late", 16, 1), (1, 2, "late", 16, 1), (4, 1, "late", 16, 1), (2, 2, "at_once", 16, 1))
    ways = [("two", "turned", *way) for way in in_two] + [("one", "straight", *way) for way in in_one]
    names = "shots", "owners", "rows", "ahead", "signals", "num_warps", "per_processor"
    seeds = [Config.of("push", dict(zip(names, way, strict=True))) for way in ways]
    owned = Constraint(("shots", "owners"), lambda shots, owners: shots == "two" or owners == "straight", "no block has an owner")
    constraints = (_held(problem, hardware), _room(problem, hardware), owned)
    return VariantSpace("push", parameters, constraints, tuple(seeds), former={"owners": "straight"})


def _behind_product(
    variant: str, plain: VariantSpace | None, problem: AllReduceNorm, hardware: Hardware
) -> VariantSpace | None:
    """The space of a variant behind a product of e4m3, which is a parameter. None without such a product, or without `plain`."""
    if plain is None or problem.front is None:
        return None
    products = scaled.choices(problem.front, problem.m, hardware, roles=True)[:3]
    seeds = [Config.of(variant, seed.values | product) for seed in plain.seeds[:4] for product in products]
    parameters = plain.parameters | scaled.parameters(problem.front, problem.m, hardware, roles=True)
    return VariantSpace(variant, parameters, (*plain.constraints, scaled.whole()), tuple(dict.fromkeys(seeds)), plain.former)


def _room(problem: AllReduceNorm, hardware: Hardware) -> Constraint:
    """All programs must be resident at the same time. A thread takes about 32 registers, plus 2 for each column that it holds."""
    columns = power_of_two(problem.hidden)

    def fits(warps: int, programs: int) -> bool:
        threads = warps * lanes(hardware)
        return programs == 1 or REGISTERS // (programs * threads) >= 32 + 2 * columns // threads

    return Constraint(("num_warps", "per_processor"), fits, "the programs do not fit in registers")


def _nearest(allowed: tuple[Value, ...], value: int) -> Value:
    return min(allowed, key=lambda choice: abs(int(choice) - value))


def _resident(problem: AllReduceNorm, hardware: Hardware) -> list[tuple[int, int]]:
    """Warps and programs of a processor to try first: several programs where there are more rows than processors."""
    few, many = [(16, 1), (8, 1), (4, 1)], [(16, 1), (8, 2), (4, 2), (8, 1), (4, 4)]
    return many if problem.m > hardware.processors and hardware.on_gpu else few


def _warps(hardware: Hardware) -> tuple[Value, ...]:
    return (1, 2, 4, 8, 16) if hardware.on_gpu else (4,)


def _held(problem: AllReduceNorm, hardware: Hardware, *rows: str) -> Constraint:
    """A program's rows must fit in the registers of its threads, and no thread may be idle."""
    columns, width = power_of_two(problem.hidden), lanes(hardware)

    def holds(warps: int, rows: int = 1) -> bool:
        threads = width * warps
        fits = rows * columns <= MOST_HELD * threads or not hardware.on_gpu
        return fits and (rows * columns >= 8 * threads or warps == 1 or not hardware.on_gpu)

    return Constraint(("num_warps", *rows), holds, "a row has too few columns for the threads, or more than fit in registers")
