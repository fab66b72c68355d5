"""Search spaces of GEMM + Reduce-Scatter, one function per variant; before them what they share beside `spaces.gemm_tiles`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from autotax.core.config import Config, Value
from autotax.core.problem import ITEM_SIZES, ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import LINK_GBPS, Hardware, lanes
from autotax.kernels.tiling import GROUP_ROWS, ProductTile
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces import gemm_tiles as gemm
from autotax.spaces import gemm_traits, scaled

USUAL_GBPS = 300.0
"""Assumed link bandwidth of unknown devices: an order of magnitude is enough to rank tiles."""
TENSOR_TFLOPS = 700.0
"""GEMM rate of an NVIDIA GPU with tiles of 128 x 256; only its ratio to the links matters."""
ADDING_GBPS = 2000.0
FEWEST_FOR_ENGINES = 256
"""From so many rows of a shard on, copy engines send in the first seed of FP8. With fewer rows a kernel starts sooner."""
MOST_FLAG_TILES = 8
DIFFERENT = 3
"""The first seeds have this many different tile sizes, because the time estimate is rough."""


def gathered(problem: GemmReduceScatter) -> AllGatherGemm:
    """The All-Gather + GEMM problem with the same number and size of tiles."""
    return AllGatherGemm(problem.m, problem.n, problem.k, problem.dtype, "m", problem.world_size, scales=problem.scales)


def _can_use_tma(problem: GemmReduceScatter, hardware: Hardware) -> bool:
    """TMA needs rows of A and B that start at multiples of 16 bytes. With `kn` a row of B has n elements."""
    aligned = problem.weight == "nk" or problem.n * problem.item_size % 16 == 0
    return aligned and gemm.can_use_tma(gathered(problem), hardware)


def payloads(problem: GemmReduceScatter) -> tuple[Value, ...]:
    """Types in which partial sums may be sent. Rounding each sum to 16 bits adds about the error of rounding the output, for any
    number of ranks, so errors stay within the tolerance. float32 costs twice the bytes.
    """
    return ("fp32",) if problem.dtype == "fp32" else (problem.dtype, "fp32")


def adder_programs(problem: GemmReduceScatter, hardware: Hardware) -> tuple[Value, ...]:
    """Choices for the number of programs that add up while the others compute; 0: all programs add up after computing."""
    if problem.world_size == 1:
        return (0,)
    return (0, *powers_of_two(min(4, hardware.processors // 2), min(32, hardware.processors // 2)))


def parameters(problem: GemmReduceScatter, hardware: Hardware) -> dict[str, tuple[Value, ...]]:
    """Parameters of tiles and of their exchange."""
    like = gathered(problem)
    tiles = gemm.tile_parameters(like, hardware)
    narrow = tuple(n for n in tiles["block_n"] if n != gemm.TWO_PRODUCTS)
    columns = ceil_div(problem.n, int(narrow[0]))
    return {
        **tiles,
        "block_n": narrow,
        "loads": ("tma",) if _can_use_tma(problem, hardware) else ("pointer",),
        **gemm.split_parameters(like, hardware),
        **gemm.order_parameters(like),
        "payload": payloads(problem),
        "adders": adder_programs(problem, hardware),
        "flag_tiles": powers_of_two(1, min(MOST_FLAG_TILES, columns)),
        "signals": ("late", "at_once"),
        "flat": (0, 1) if hardware.backend == "cuda" else (0,),
    }


def constraints(problem: GemmReduceScatter, hardware: Hardware) -> tuple[Constraint, ...]:
    """Resource limits, and the conditions of split-K and of flat loops."""
    like = gathered(problem)
    flat = Constraint(
        ("splits", "flag_tiles", "signals", "flat"),
        lambda splits, tiles, when, flat: flat == 0 or (splits, tiles, when) == (1, 1, "late"),
        "only a loop over whole tiles with a flag each, told of late, is flattened",
    )
    return (*gemm.tile_constraints(like, hardware), *gemm.split_constraints(like, hardware), flat)


def base_us(problem: GemmReduceScatter) -> float:
    """The maximum of the times of GEMM, links and memory, and the start, as for All-Gather + GEMM; the links carry sums."""
    return max(gemm_traits.base_us(gathered(problem)), gemm_traits.START_US + _links_us(problem, problem.item_size))


def _links_us(problem: GemmReduceScatter, item_size: int) -> float:
    rounds = 2 if problem.output == "replicated" else 1
    return gemm_traits.links_us(rounds * (problem.world_size - 1) * problem.shard_rows * problem.n * item_size)


def traits(problem: GemmReduceScatter, hardware: Hardware, config: Config) -> dict[str, float]:
    """Feature values by name: those of the tiles, of the sums that travel, and of the programs that add."""
    values = config.values
    item = 4 if values.get("payload") == "fp32" else ITEM_SIZES[problem.out_dtype]
    return gemm_traits.traits(gathered(problem), hardware, config) | {
        "links_share": _links_us(problem, item) / base_us(problem),
        "adders_share": int(values.get("adders", 0)) / hardware.processors,
    }


def time_of(problem: GemmReduceScatter, hardware: Hardware, config: Config) -> float:
    """Rough microseconds of a call: waves of tiles, the links from the end of the first wave on, and the additions.

    Tiles for peers are computed first, so their transfer overlaps with this rank's own tiles. Nothing hides the transfers that
    are left after the last wave.
    """
    m, n, world = int(config["block_m"]), int(config["block_n"]), problem.world_size
    tiles = world * ceil_div(problem.shard_rows, m) * ceil_div(problem.n, n)
    workers = hardware.processors - int(config["adders"])
    rate = TENSOR_TFLOPS / hardware.processors * gemm.RATES.get(m * n, 0.3)
    tile = 2 * m * n * problem.k / rate / 1e6
    splits = int(config["splits"])
    whole, left = divmod(tiles, workers)
    waves = whole + (min(1.0, gemm.COSTS_OF_PARTS[0] * ceil_div(left * splits, workers) / splits) if left else 0)
    item = 4 if config["payload"] == "fp32" else problem.item_size
    bandwidth = LINK_GBPS.get(hardware.device, USUAL_GBPS) * 1e3
    sent = (world - 1) * problem.shard_rows * problem.n * item
    wave = min(sent, workers * m * n * item) / bandwidth
    remote = ceil_div(tiles * (world - 1) // world, workers)
    links = max(min(1.0, waves) * tile + sent / bandwidth, min(remote, waves) * tile + wave)
    added = (world + 1) * problem.shard_rows * problem.n * item / (ADDING_GBPS * 1e3)
    return max(waves * tile, links) + added * (1 if config["adders"] == 0 else 0.5)


def seeds(
    problem: GemmReduceScatter, hardware: Hardware, variant: str, extras: list[dict[str, Value]], most: int
) -> tuple[Config, ...]:
    """The tiles of All-Gather + GEMM with these extras; on NVIDIA sorted by `time_of`, the first ones of different sizes."""
    allowed = parameters(problem, hardware)
    chosen: dict[Config, None] = {}
    base = {"order": allowed["order"][-1], "splits": 1}
    for number, extra in enumerate(extras):
        shapes = 7 if number == 0 else 3
        for seed in gemm.seeds_of(gathered(problem), hardware, variant, [base | extra], shapes):
            if seed["block_n"] != gemm.TWO_PRODUCTS:
                flat = {"flat": 0} if seed["splits"] != 1 else {}
                chosen[Config.of(variant, seed.values | {"loads": allowed["loads"][0]} | flat)] = None
    configs = list(chosen)
    if hardware.backend == "cuda":
        configs.sort(key=lambda config: time_of(problem, hardware, config))
        sizes = {(config["block_m"], config["block_n"]): config for config in reversed(configs)}
        firsts = sorted(sizes.values(), key=configs.index)
        configs = list(dict.fromkeys([*firsts[:DIFFERENT], *configs]))
    return tuple(configs[:most])


def fused_space(problem: GemmReduceScatter, hardware: Hardware, variant: str, adders: int) -> VariantSpace:
    """The space of a variant whose own GEMM sends its tiles or lets peers read them; most seeds have `adders` adding programs."""
    allowed = parameters(problem, hardware)
    many = max(count for count in allowed["adders"] if int(count) <= adders)
    some = max(count for count in allowed["adders"] if int(count) <= 8)
    defaults: dict[str, Value] = {"payload": allowed["payload"][0], "flag_tiles": 1, "signals": "late", "adders": many, "flat": 0}
    extras = [
        defaults,
        defaults | {"flat": allowed["flat"][-1]},
        defaults | {"adders": some},
        defaults | {"flag_tiles": allowed["flag_tiles"][-1]},
        defaults | {"signals": "at_once"},
    ]
    return VariantSpace(variant, allowed, constraints(problem, hardware), seeds(problem, hardware, variant, extras, 10))


bsp = scaled.bsp


def scaled_decomposed(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Products of e4m3 with the sums of `decomposed`. Few rows begin with a kernel that sends."""
    if problem.dtype != "e4m3":
        return None
    plain = _decomposed(problem, hardware)
    products = scaled.choices(problem, problem.m, hardware, roles=True)
    ways = plain.seeds if problem.shard_rows >= FEWEST_FOR_ENGINES else (*plain.seeds[-2:], *plain.seeds[:-2])
    seeds = [Config.of("scaled_decomposed", seed.values | products[at]) for at in (0, min(1, len(products) - 1)) for seed in ways]
    parameters = plain.parameters | scaled.parameters(problem, problem.m, hardware, roles=True)
    return VariantSpace("scaled_decomposed", parameters, (*plain.constraints, scaled.whole()), tuple(dict.fromkeys(seeds)))


def scaled_words(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Few rows, with a product of Triton's."""
    rows = problem.world_size * problem.shard_rows
    if problem.dtype != "e4m3" or rows > gemm.MOST_ROWS:
        return None
    shots: tuple[Value, ...] = ("one", "two") if problem.output == "replicated" and problem.world_size > 1 else ("one",)
    payload: tuple[Value, ...] = (problem.result, "fp32")
    sent = (problem.world_size - 1) * problem.m * problem.n * 4
    ordered = shots if sent <= ONE_SHOT_BYTES else shots[::-1]
    parameters = scaled.parameters(problem, rows, hardware, library=False)
    parameters["product"] = tuple(name for name in parameters["product"] if ProductTile.of(name).columns <= 128)
    choices = scaled.choices(problem, rows, hardware, library=False, one_program_each=True)
    products = [choice for choice in choices if choice["product"] in parameters["product"]]
    seeds = [Config.of("scaled_words", choice, payload=payload[0], shots=shot) for shot in ordered for choice in products[:4]]
    return VariantSpace("scaled_words", parameters | {"payload": payload, "shots": shots}, seeds=tuple(seeds))


def decomposed(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """None for e4m3, which has `scaled_decomposed`."""
    return None if problem.dtype == "e4m3" else _decomposed(problem, hardware)


def _decomposed(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace:
    """A single GEMM for all ranks stores to one place only, so its result is sent afterwards."""
    comms = gemm.comm_programs(hardware)
    many = min(16, comms[-1])
    parameters: dict[str, tuple[Value, ...]] = {
        "products": ("each", "halves", "one"),
        "sender": ("engine", "product", "kernel"),
        "comm": comms,
    }
    seeds: list[tuple[str, str, int]] = [
        ("each", "engine", comms[0]),
        ("each", "product", comms[0]),
        ("each", "kernel", many),
        ("one", "kernel", many),
    ]
    if problem.shard_rows >= 2 * gemm.LEAST_HALF:
        seeds[1:1] = [("halves", "engine", comms[0])]
    constraints = (
        Constraint(
            ("sender", "comm"), lambda how, comm: how == "kernel" or comm == comms[0], "only a kernel has programs that send"
        ),
        Constraint(
            ("products", "sender"),
            lambda products, how: (products, how) != ("one", "product"),
            "one product is stored in one place",
        ),
    )
    configs = tuple(Config.of("decomposed", products=how, sender=sender, comm=comm) for how, sender, comm in seeds)
    return VariantSpace("decomposed", parameters, constraints, configs)


def two_kernel(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """None for e4m3, which has `scaled_two_kernel`."""
    return None if problem.dtype == "e4m3" else _two_kernel(hardware)


def scaled_two_kernel(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Products of e4m3 with the sums of `two_kernel`."""
    if problem.dtype != "e4m3":
        return None
    plain, products = _two_kernel(hardware), scaled.choices(problem, problem.m, hardware, roles=True)
    seeds = [Config.of("scaled_two_kernel", seed.values | product) for seed in plain.seeds[:2] for product in products[:4]]
    parameters = plain.parameters | scaled.parameters(problem, problem.m, hardware, roles=True)
    return VariantSpace("scaled_two_kernel", parameters, (scaled.whole(),), tuple(dict.fromkeys(seeds)))


def _two_kernel(hardware: Hardware) -> VariantSpace:
    """How the kernel after the product cuts the partial sums."""
    parameters: dict[str, tuple[Value, ...]] = {
        "waves": (1, 2) if hardware.on_gpu else (1,),
        "parts": (1, 2, 4),
        "num_warps": (8, 16) if hardware.on_gpu else (4,),
    }
    warps = parameters["num_warps"]
    configs = [Config.of("two_kernel", waves=1, parts=parts, num_warps=count) for parts in (1, 2) for count in warps[::-1]]
    return VariantSpace("two_kernel", parameters, seeds=tuple(configs))


def two_kernel_words(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """None for many rows, and for e4m3: see `scaled_two_kernel_words`."""
    return None if problem.dtype == "e4m3" else _two_kernel_words(problem, hardware)


def scaled_two_kernel_words(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Products of e4m3 with the sums of `two_kernel_words`."""
    plain = _two_kernel_words(problem, hardware)
    if problem.dtype != "e4m3" or plain is None:
        return None
    products = scaled.choices(problem, problem.m, hardware, roles=True)[:4]
    seeds = [Config.of("scaled_two_kernel_words", seed.values | product) for product in products for seed in plain.seeds[:2]]
    parameters = plain.parameters | scaled.parameters(problem, problem.m, hardware, roles=True)
    return VariantSpace("scaled_two_kernel_words", parameters, (*plain.constraints, scaled.whole()), tuple(dict.fromkeys(seeds)))


def specialized_words(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """None for many rows, for float32, and for e4m3: see `scaled_specialized_words`."""
    return None if problem.dtype == "e4m3" else _specialized_words("specialized_words", problem, hardware)


def scaled_specialized_words(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """That of `specialized_words` for words of two codes."""
    return _specialized_words("scaled_specialized_words", problem, hardware) if problem.dtype == "e4m3" else None


def _specialized_words(variant: str, problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Few rows by warps with roles. A tile is one part of B wide, so that a group stages it at once.

    A scattered output may have twice the rows, for two ranks then send as much. The rows of a group must be whole shares of the
    ranks there, so that tiles hold all rows of padding.
    """
    scattered = problem.output == "scattered"
    if problem.m > gemm.MOST_ROWS * (2 if scattered else 1) or (scattered and GROUP_ROWS % problem.world_size != 0):
        return None
    tiles = scaled.with_roles(problem, problem.m, hardware, scaled.BLOCKS_OF_ONE_SCALE)
    if not tiles:
        return None
    seeds = [Config.of(variant, product=tile, splits=splits) for tile, splits in tiles.items()]
    return VariantSpace(variant, {"product": tuple(tiles), "splits": scaled.splits_of(problem)}, seeds=tuple(seeds))


def _two_kernel_words(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """How the kernel after the product exchanges its words. A word has eight bytes of data, or four."""
    item, world = ITEM_SIZES[problem.out_dtype], problem.world_size
    rows = world * problem.shard_rows
    if rows > gemm.MOST_ROWS or problem.n * item % 4 != 0:
        return None
    replicated = problem.output == "replicated" and world > 1
    sent = (world - 1) * problem.m * problem.n * item
    parameters: dict[str, tuple[Value, ...]] = {
        "words": ("blank", "epoch") if problem.n * item % 8 == 0 else ("epoch",),
        "shots": ("one", "two") if replicated else ("one",),
        "block": powers_of_two(128, 1024),
        "num_warps": (2, 4, 8) if hardware.on_gpu else (2,),
        "per_processor": (1, 2) if hardware.on_gpu else (1,),
    }
    enough = Constraint(
        ("block", "num_warps"), lambda block, warps: block >= warps * lanes(hardware), "some threads would have no word"
    )
    ordered = parameters["shots"] if world == 2 or sent <= ONE_SHOT_BYTES else parameters["shots"][::-1]
    seeds = []
    for shots, kind, programs in itertools.product(ordered, parameters["words"], parameters["per_processor"]):
        parts = 1 if replicated and shots == "one" else world
        words = ceil_div(problem.m * problem.n * item, parts * (8 if kind == "blank" else 4))
        block = min(1024, max(128, power_of_two(ceil_div(words, int(programs) * hardware.processors))))
        warps = max(count for count in parameters["num_warps"] if int(count) == 2 or int(count) * 64 <= block)
        values: dict[str, Value] = {"words": kind, "shots": shots, "block": block, "num_warps": warps, "per_processor": programs}
        seeds.append(Config.of("two_kernel_words", values))
    return VariantSpace("two_kernel_words", parameters, (enough,), tuple(seeds))


def pull_reduce(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Seeds let some programs read and add up while the others compute, because saturating reads take many programs."""
    return None if problem.dtype == "e4m3" else fused_space(problem, hardware, "pull_reduce", 32)


def push(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """In most seeds all programs compute first and add up afterwards."""
    return None if problem.dtype == "e4m3" else fused_space(problem, hardware, "push", 0)


MOST_BLOCK_M = 64
ONE_SHOT_BYTES = 2 << 20
"""Seeds start with one trip if a rank sends at most this many bytes in it, else with two."""


def words(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """None for many rows."""
    rows = problem.world_size * problem.shard_rows
    if rows > gemm.MOST_ROWS or problem.dtype == "e4m3":
        return None
    tiles = parameters(problem, hardware)
    high = min(MOST_BLOCK_M, power_of_two(max(16, rows)))
    allowed: dict[str, tuple[Value, ...]] = {
        "block_m": powers_of_two(16, high),
        "block_n": tuple(n for n in tiles["block_n"] if int(n) <= 128),
        "block_k": tiles["block_k"],
        "num_warps": tiles["num_warps"],
        "num_stages": (2, 3, 4, 5, 6, 8) if hardware.on_gpu else (2,),
        "group_m": (1, 8),
        "loads": tiles["loads"],
        "splits": gemm.splits_of(ceil_div(problem.k, 128), hardware),
        "payload": tiles["payload"],
        "shots": ("one", "two") if problem.output == "replicated" and problem.world_size > 1 else ("one",),
    }
    product = replace(gathered(problem), m=rows if problem.output == "scattered" else problem.m, world_size=1)
    registers, pipeline, *_ = gemm.tile_constraints(product, hardware)
    left, _ = gemm.split_constraints(product, hardware)
    sent = (problem.world_size - 1) * problem.m * problem.n * problem.item_size * 2
    shots = allowed["shots"] if sent <= ONE_SHOT_BYTES else allowed["shots"][::-1]
    # Tiles with all the rows, narrow or split along K so that every processor reads a share of B.
    firsts: list[dict[str, Value]] = [{"block_m": high, "shots": shot} for shot in shots]
    shapes = ((64, 128, 5, 4), (32, 128, 6, 4), (128, 64, 5, 4), (64, 64, 8, 4), (64, 128, 3, 4))
    space = VariantSpace("words", allowed, (registers, pipeline, left))
    return gemm.with_narrow_tiles(space, hardware, partial(gemm.count_tiles, product), shapes, firsts, shallower=False)
