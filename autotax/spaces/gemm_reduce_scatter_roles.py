"""Search spaces of the variants of GEMM + Reduce-Scatter that send tiles by warps with roles. Their instructions are Hopper's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import LINK_GBPS, Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.scaled import as_words
from autotax.spaces import gemm_roles, scaled
from autotax.spaces import gemm_tiles as gemm
from autotax.spaces.gemm_reduce_scatter import USUAL_GBPS, gathered

BLOCKS_M, BLOCKS_N = (64, 128), (128, 256)
"""Rows for one or two warp groups, and columns for one or two parts."""
EPILOGUE, WARPS = "epilogue", "warps"
PIECE, AHEAD = "piece", "ahead"
"""Where other warps add up: each small piece is polled for, or one poll reads the flags of many larger ones."""
FEW_REGISTERS = "groups of warps have too few registers for such a tile"
CYCLES_PER_US = 1500
"""Clock of an H200 at full load, roughly."""
FEWEST_ROWS = 128
"""Fewest rows of a replicated output that travel in tiles. Fewer travel as words."""
MOST_OF_ONE_SHOT = 4
"""Most ranks that send their tiles to all. Four send twice as much as in two trips, eight four times as much."""


def push_specialized(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Only for a scattered output of 16 bits and weights [n, k]; None elsewhere."""
    return _scattered("push_specialized", problem, hardware, lambda *_: True)


def scaled_specialized(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """That of `push_specialized` for words of two codes, which take the time of numbers of 16 bits."""
    return _of_codes(_scattered, "scaled_specialized", problem, hardware)


def push_one_shot(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Only for a replicated output of 16 bits and weights [n, k]; None elsewhere."""
    return _replicated("push_one_shot", problem, hardware, lambda *_: True)


def scaled_push_one_shot(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """That of `push_one_shot` for words of two codes."""
    return _of_codes(_replicated, "scaled_push_one_shot", problem, hardware)


Suits = Callable[[int, int, str], bool]
"""Whether groups of warps have the registers for a tile of so many rows and columns, by who adds up."""


def _scattered(variant: str, problem: GemmReduceScatter, hardware: Hardware, suits: Suits) -> VariantSpace | None:
    """The sums of a rank's own tiles are added up by warps of their own or in the epilogue of the product, which leaves more
    registers to it.
    """
    if problem.output != "scattered" or not gemm_roles.have_roles(problem, hardware):
        return None
    orders = gemm.order_parameters(gathered(problem))["order"]
    choices, fits = _tiles(hardware)
    parameters = choices | {"order": orders, "adds": (EPILOGUE, WARPS)}
    alone = Constraint(("adds", "polls"), lambda adds, polls: adds == WARPS or polls == PIECE, "an epilogue polls tile by tile")
    constraints = Constraint(("block_m", "block_n", "adds"), suits, FEW_REGISTERS), alone, fits
    us = partial(_product_us, problem, hardware)
    tiles = _tiles_by(us, suits, EPILOGUE)
    ways = list(itertools.product((8, 4), orders[::-1]))
    # Every tile comes up: the estimate does not know how well a tile hides the transfers.
    points = [*itertools.product(tiles[:2], ways), *((tile, ways[0]) for tile in tiles[2:])]
    seeds = [_seed(variant, hardware, tile, group, PIECE, order=order, adds=EPILOGUE) for tile, (group, order) in points]
    apart = _tiles_by(us, suits, WARPS)[:2]
    seeds[1:1] = [_seed(variant, hardware, tile, ways[0][0], AHEAD, order=ways[0][1], adds=WARPS) for tile in apart]
    return VariantSpace(variant, parameters, constraints, tuple(seeds), former={"adds": WARPS, "polls": PIECE})


def _replicated(variant: str, problem: GemmReduceScatter, hardware: Hardware, suits: Suits) -> VariantSpace | None:
    """Warps of their own add up the tiles of all ranks. Two ranks send as much as in two trips."""
    suited = problem.output == "replicated" and problem.m >= FEWEST_ROWS and 1 < problem.world_size <= MOST_OF_ONE_SHOT
    if not suited or not gemm_roles.have_roles(problem, hardware):
        return None
    parameters, fits = _tiles(hardware)
    constraints = Constraint(("block_m", "block_n"), lambda m, n: suits(m, n, WARPS), FEW_REGISTERS), fits
    tiles = _tiles_by(partial(_one_trip_us, problem, hardware), suits, WARPS)
    seeds = [_seed(variant, hardware, tile, group, AHEAD) for group in (8, 4) for tile in tiles]
    return VariantSpace(variant, parameters, constraints, tuple(seeds), former={"polls": PIECE})


def _of_codes(
    space_of: Callable[[str, GemmReduceScatter, Hardware, Suits], VariantSpace | None],
    variant: str, problem: GemmReduceScatter, hardware: Hardware,
) -> VariantSpace | None:  # fmt: skip
    """A space for words of two codes. With a scale per block or with strips the groups need more registers."""
    if problem.dtype != "e4m3" or problem.operand != "e4m3":
        return None
    wide = problem.scales != "block"
    suits = lambda m, n, adds: n == 128 or (wide and (m == 64 or adds == EPILOGUE))  # noqa: E731
    space = space_of(variant, as_words(problem), hardware, suits)
    if space is None:
        return None
    names = *(name for name in ("adds",) if name in space.parameters), "strip"  # without the choice other warps add up
    allowed = lambda *values: wide or EPILOGUE in values or scaled.GROUP in values  # noqa: E731
    one_sum = Constraint(names, allowed, "groups have too few registers")
    return scaled.with_strips(replace(space, constraints=(*space.constraints, one_sum)), problem)


def _tiles(hardware: Hardware) -> tuple[dict[str, tuple[Value, ...]], Constraint]:
    """Parameters of warp-specialized tiles, and the limit of shared memory."""
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": BLOCKS_M,
        "block_n": BLOCKS_N,
        "num_stages": gemm_roles.STAGES,
        "group_m": (1, 4, 8),
        "polls": (PIECE, AHEAD),
    }
    fits = partial(gemm_roles.fits, hardware)
    return parameters, Constraint(("block_m", "block_n", "num_stages"), fits, "the pipeline does not fit in shared memory")


def _tiles_by(us: Callable[[int, int], float], suits: Suits, adds: str) -> list[tuple[int, int]]:
    """The tiles, by their estimated microseconds."""
    tiles = (tile for tile in itertools.product(BLOCKS_M, BLOCKS_N) if suits(*tile, adds))
    return sorted(tiles, key=lambda tile: us(*tile))


def _product_us(problem: GemmReduceScatter, hardware: Hardware, m: int, n: int) -> float:
    return gemm_roles.time_of(gathered(problem), hardware.processors, m, n) / CYCLES_PER_US


def _one_trip_us(problem: GemmReduceScatter, hardware: Hardware, m: int, n: int) -> float:
    """Estimated microseconds of a product whose tiles go to all ranks: nothing hides the transfers of the last wave, and no link
    works while the first tile is multiplied.
    """
    tiles = ceil_div(problem.m, m) * ceil_div(problem.n, n)
    waves = ceil_div(tiles, hardware.processors)
    product = _product_us(problem, hardware, m, n)
    sent = (problem.world_size - 1) * problem.item_size / (LINK_GBPS.get(hardware.device, USUAL_GBPS) * 1e3)
    last = (tiles - (waves - 1) * hardware.processors) * m * n * sent
    return max(product + last, product / waves + problem.m * problem.n * sent)


def _seed(variant: str, hardware: Hardware, sizes: tuple[int, int], group: int, polls: str, **others: Value) -> Config:
    stages = gemm_roles.most_stages(hardware, *sizes)
    tile = dict(zip(("block_m", "block_n", "num_stages", "group_m"), (*sizes, stages, group), strict=True))
    return Config.of(variant, {**tile, "polls": polls, **others})
