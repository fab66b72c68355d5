"""Parts that the search spaces of GEMM + Reduce-Scatter share: tiles, payloads, flags, and seeds from arithmetic.

A rank computes as many tiles as in All-Gather + GEMM with the same sizes, in shards of the same height. So tile parameters and
resource limits come from `spaces.all_gather_gemm.tiles`.
"""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.links import LINK_GBPS
from autotax.spaces.all_gather_gemm import tiles as gemm

USUAL_GBPS = 300.0
"""Assumed link bandwidth of unknown devices: an order of magnitude is enough to rank tiles."""
TENSOR_TFLOPS = 700.0
"""GEMM rate of an NVIDIA GPU with tiles of 128 x 256; only its ratio to the links matters."""
ADDING_GBPS = 2000.0
MOST_FLAG_TILES = 8
DIFFERENT = 3
"""The first seeds have this many different tile sizes, because the time estimate is rough."""


def gathered(problem: GemmReduceScatter) -> AllGatherGemm:
    """The All-Gather + GEMM problem with the same number and size of tiles."""
    return AllGatherGemm(problem.m, problem.n, problem.k, problem.dtype, "m", problem.world_size)


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
    found = gemm.tile_parameters(like, hardware)
    narrow = tuple(n for n in found["block_n"] if n != gemm.TWO_PRODUCTS)
    columns = ceil_div(problem.n, int(narrow[0]))
    return {
        **found,
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
    """The tiles of All-Gather + GEMM with these extras. On NVIDIA they are sorted by `time_of`, and the first ones differ in
    size.
    """
    allowed = parameters(problem, hardware)
    found: dict[Config, None] = {}
    base = {"order": allowed["order"][-1], "splits": 1}
    for number, extra in enumerate(extras):
        shapes = 7 if number == 0 else 3
        for seed in gemm.seeds_of(gathered(problem), hardware, variant, [base | extra], shapes):
            if seed["block_n"] != gemm.TWO_PRODUCTS:
                flat = {"flat": 0} if seed["splits"] != 1 else {}
                found[Config.of(variant, seed.values | {"loads": allowed["loads"][0]} | flat)] = None
    configs = list(found)
    if hardware.backend == "cuda":
        configs.sort(key=lambda config: time_of(problem, hardware, config))
        sizes = {(config["block_m"], config["block_n"]): config for config in reversed(configs)}
        firsts = sorted(sizes.values(), key=configs.index)
        configs = list(dict.fromkeys([*firsts[:DIFFERENT], *configs]))
    return tuple(configs[:most])


def fused_space(problem: GemmReduceScatter, hardware: Hardware, variant: str, adders: int) -> VariantSpace:
    """The space of a variant whose own GEMM sends its tiles or lets peers read them; most seeds have `adders` adding programs."""
    allowed = parameters(problem, hardware)
    many = max(each for each in allowed["adders"] if int(each) <= adders)
    some = max(each for each in allowed["adders"] if int(each) <= 8)
    usual: dict[str, Value] = {"payload": allowed["payload"][0], "flag_tiles": 1, "signals": "late", "adders": many, "flat": 0}
    extras = [
        usual,
        usual | {"flat": allowed["flat"][-1]},
        usual | {"adders": some},
        usual | {"flag_tiles": allowed["flag_tiles"][-1]},
        usual | {"signals": "at_once"},
    ]
    return VariantSpace(variant, allowed, constraints(problem, hardware), seeds(problem, hardware, variant, extras, 10))
