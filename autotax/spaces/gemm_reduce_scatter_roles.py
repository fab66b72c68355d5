"""Search spaces of the variants of GEMM + Reduce-Scatter that send tiles by warps with roles. Their instructions are Hopper's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.scaled import as_words
from autotax.spaces import gemm_roles, scaled
from autotax.spaces import gemm_tiles as gemm
from autotax.spaces.gemm_reduce_scatter import gathered

BLOCKS_M, BLOCKS_N = (64, 128), (128, 256)
"""Rows for one or two warp groups, and columns for one or two parts."""
EPILOGUE = "epilogue"


def push_specialized(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Only for a scattered output of 16 bits and weights [n, k]; None elsewhere."""
    return _specialized("push_specialized", problem, hardware, lambda *_: True)


def scaled_specialized(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """That of `push_specialized` for words of two codes, which take the time of numbers of 16 bits."""
    if problem.dtype != "e4m3" or problem.operand != "e4m3":
        return None
    wide = problem.scales != "block"
    suits = lambda m, n, adds: n == 128 or (wide and (m == 64 or adds == EPILOGUE))  # noqa: E731
    space = _specialized("scaled_specialized", as_words(problem), hardware, suits)
    one_sum = Constraint(
        ("adds", "strip"), lambda adds, strip: wide or adds == EPILOGUE or strip == scaled.GROUP, "groups have too few registers"
    )
    return space and scaled.with_strips(replace(space, constraints=(*space.constraints, one_sum)), problem)


FEW_REGISTERS = "groups of warps have too few registers for such a tile"


def _tiles_by_roles(
    problem: GemmReduceScatter, hardware: Hardware, suits: Callable[[int, int], bool]
) -> tuple[dict[str, tuple[Value, ...]], Constraint, list[tuple[int, int]]]:
    """Parameters of warp-specialized tiles, the limit of shared memory, and the tiles that seeds have, the fastest first."""
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": BLOCKS_M,
        "block_n": BLOCKS_N,
        "num_stages": gemm_roles.STAGES,
        "group_m": (1, 4, 8),
    }
    fits = partial(gemm_roles.fits, hardware)
    limit = Constraint(("block_m", "block_n", "num_stages"), fits, "the pipeline does not fit in shared memory")
    like, sizes = gathered(problem), [tile for tile in itertools.product(BLOCKS_M, BLOCKS_N) if suits(*tile)]
    return parameters, limit, sorted(sizes, key=lambda tile: gemm_roles.time_of(like, hardware.processors, *tile))


def _specialized(
    variant: str, problem: GemmReduceScatter, hardware: Hardware, suits: Callable[[int, int, str], bool]
) -> VariantSpace | None:
    """A warp-specialized GEMM of tiles that it `suits`. The sums of a rank's own tiles are added up by warps of their own or in
    the epilogue of the product, which leaves more registers to it.
    """
    if problem.output != "scattered" or not gemm_roles.have_roles(problem, hardware):
        return None
    orders = gemm.order_parameters(gathered(problem))["order"]
    usual, fits, tiles = _tiles_by_roles(problem, hardware, lambda m, n: suits(m, n, EPILOGUE))
    parameters = usual | {"order": orders, "adds": (EPILOGUE, "warps")}
    constraints = Constraint(("block_m", "block_n", "adds"), suits, FEW_REGISTERS), fits
    ways = list(itertools.product((8, 4), orders[::-1]))
    # Every tile comes up: the estimate does not know how well a tile hides the transfers.
    points = [*itertools.product(tiles[:2], ways), *((tile, ways[0]) for tile in tiles[2:])]
    seeds = []
    for (m, n), (group, order) in points:
        stages = gemm_roles.most_stages(hardware, m, n)
        seeds.append(Config.of(variant, block_m=m, block_n=n, num_stages=stages, group_m=group, order=order, adds=EPILOGUE))
    apart = [Config.of(variant, seed.values | {"adds": "warps"}) for seed in seeds]
    seeds[2:2] = [seed for seed in apart if suits(seed["block_m"], seed["block_n"], "warps")][:1]
    return VariantSpace(variant, parameters, constraints, tuple(seeds), former={"adds": "warps"})


FEWEST_ROWS = 128
"""Fewest rows of a replicated output that travel in tiles. Fewer travel as words."""
MOST_OF_ONE_SHOT = 4
"""Most ranks that send their tiles to all. Four send twice as much as in two trips, eight four times as much."""


def push_one_shot(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Only for a replicated output of 16 bits and weights [n, k]; None elsewhere."""
    return _one_shot("push_one_shot", problem, hardware, lambda *_: True)


def scaled_push_one_shot(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """That of `push_one_shot` for words of two codes."""
    if problem.dtype != "e4m3" or problem.operand != "e4m3":
        return None
    wide = problem.scales != "block"
    space = _one_shot("scaled_push_one_shot", as_words(problem), hardware, lambda m, n: n == 128 or (wide and m == 64))
    one_sum = Constraint(("strip",), lambda strip: wide or strip == scaled.GROUP, "groups have too few registers")
    return space and scaled.with_strips(replace(space, constraints=(*space.constraints, one_sum)), problem)


def _one_shot(
    variant: str, problem: GemmReduceScatter, hardware: Hardware, suits: Callable[[int, int], bool]
) -> VariantSpace | None:
    """A warp-specialized GEMM of tiles that it `suits`, which all ranks add up. Two ranks send as much as in two trips."""
    suited = problem.output == "replicated" and problem.m >= FEWEST_ROWS and 1 < problem.world_size <= MOST_OF_ONE_SHOT
    if not suited or not gemm_roles.have_roles(problem, hardware):
        return None
    parameters, fits, tiles = _tiles_by_roles(problem, hardware, suits)
    constraints = Constraint(("block_m", "block_n"), suits, FEW_REGISTERS), fits
    seeds = [
        Config.of(variant, block_m=m, block_n=n, num_stages=gemm_roles.most_stages(hardware, m, n), group_m=group)
        for group in (8, 4)
        for m, n in tiles
    ]
    return VariantSpace(variant, parameters, constraints, tuple(seeds))
