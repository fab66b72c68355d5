"""Tiles of GEMMs in Triton, for the spaces of both GEMM operators: parameters, limits, split-K, orders of shards, seeds.

A rank of GEMM + Reduce-Scatter computes as many tiles as one of All-Gather + GEMM with the same sizes, in shards of the same
height. So all these functions take a problem of All-Gather + GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware, blocks_held, lanes
from autotax.operators.all_gather_gemm import AllGatherGemm

MOST_ROWS = 256
"""Most rows, over all ranks, of variants that send words, which double the bytes or more. All-Gather + GEMM is faster with flags
at 256 already. Measured like `spaces.all_gather_gemm_roles.PACE`.
"""
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
    return {"splits": splits_of(ceil_div(problem.k, int(tile_parameters(problem, hardware)["block_k"][-1])), hardware)}


def splits_of(blocks: int, hardware: Hardware) -> tuple[Value, ...]:
    """Into how many parts so many blocks of K may be cut."""
    return tuple(splits for splits in ((1, 2, 3, 4, 6, 8) if hardware.on_gpu else (1, 2, 3)) if splits <= blocks)


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
