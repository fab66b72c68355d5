"""Search spaces of the variants of GEMM + Reduce-Scatter that send tiles by warps with roles. Their instructions are Hopper's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS, PART_ROWS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.scaled import as_words
from autotax.spaces import gemm_roles, scaled
from autotax.spaces import gemm_tiles as gemm
from autotax.spaces.gemm_reduce_scatter import gathered

BLOCKS_M, BLOCKS_N = (64, 128), (128, 256)
"""Rows for one or two warp groups, and columns for one or two parts."""
EPILOGUE, WARPS = "epilogue", "warps"


TWO_SENDERS = 2
"""Warps that send where others add up. One sends a part while the other waits until its own is written."""
FEW_REGISTERS = "groups of warps have too few registers for such a tile"
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
    usual, fits = _tiles(hardware)
    parameters = usual | {"order": orders, "adds": (EPILOGUE, WARPS)}
    alone = Constraint(("adds", "senders"), lambda adds, senders: adds == WARPS or senders == 1, "an epilogue has one sender")
    constraints = Constraint(("block_m", "block_n", "adds"), suits, FEW_REGISTERS), alone, fits
    tiles = _fastest(problem, hardware, lambda m, n: suits(m, n, EPILOGUE))
    ways = list(itertools.product((8, 4), orders[::-1]))
    # Every tile comes up: the estimate does not know how well a tile hides the transfers.
    points = [*itertools.product(tiles[:2], ways), *((tile, ways[0]) for tile in tiles[2:])]
    seeds = [_seed(variant, hardware, *tile, group, order=order, adds=EPILOGUE) for tile, (group, order) in points]
    apart = [
        _seed(variant, hardware, *tile, ways[0][0], TWO_SENDERS, order=ways[0][1], adds=WARPS)
        for tile in _fastest(problem, hardware, lambda m, n: suits(m, n, WARPS))
    ]
    seeds[1:1], seeds[3:3] = apart[:1], apart[1:]
    return VariantSpace(variant, parameters, constraints, tuple(seeds), former={"adds": WARPS, "senders": 1})


def _replicated(variant: str, problem: GemmReduceScatter, hardware: Hardware, suits: Suits) -> VariantSpace | None:
    """Warps of their own add up the tiles of all ranks. Two ranks send as much as in two trips."""
    suited = problem.output == "replicated" and problem.m >= FEWEST_ROWS and 1 < problem.world_size <= MOST_OF_ONE_SHOT
    if not suited or not gemm_roles.have_roles(problem, hardware):
        return None
    parameters, fits = _tiles(hardware)
    tiles = _fastest(problem, hardware, lambda m, n: suits(m, n, WARPS))
    constraints = Constraint(("block_m", "block_n"), lambda m, n: suits(m, n, WARPS), FEW_REGISTERS), fits
    seeds = [_seed(variant, hardware, *tile, group, TWO_SENDERS) for group in (8, 4) for tile in tiles]
    seeds[2:2] = [_seed(variant, hardware, *tiles[0], 8)]
    return VariantSpace(variant, parameters, constraints, tuple(seeds), former={"senders": 1})


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
    few = "groups have too few registers"
    if "adds" in space.parameters:
        one_sum = Constraint(("adds", "strip"), lambda adds, strip: wide or adds == EPILOGUE or strip == scaled.GROUP, few)
    else:
        one_sum = Constraint(("strip",), lambda strip: wide or strip == scaled.GROUP, few)
    return scaled.with_strips(replace(space, constraints=(*space.constraints, one_sum)), problem)


def _tiles(hardware: Hardware) -> tuple[dict[str, tuple[Value, ...]], Constraint]:
    """Parameters of warp-specialized tiles, and the limit of shared memory."""
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": BLOCKS_M,
        "block_n": BLOCKS_N,
        "num_stages": gemm_roles.STAGES,
        "group_m": (1, 4, 8),
        "senders": (1, TWO_SENDERS),
    }
    fits = lambda m, n, stages, senders: gemm_roles.fits(hardware, m, n, stages, _boxes(m, senders))  # noqa: E731
    limit = Constraint(("block_m", "block_n", "num_stages", "senders"), fits, "the pipeline does not fit in shared memory")
    return parameters, limit


def _boxes(block_m: int, senders: int) -> int:
    """The staging areas of a second sender as boxes of shared memory."""
    return (senders - 1) * block_m * PART_ROWS // (GROUP_ROWS * BLOCK_K)


def _fastest(
    problem: GemmReduceScatter, hardware: Hardware, suits: Callable[[int, int], bool]
) -> list[tuple[int, int]]:
    """The tiles, the fastest first."""
    like, tiles = gathered(problem), [tile for tile in itertools.product(BLOCKS_M, BLOCKS_N) if suits(*tile)]
    return sorted(tiles, key=lambda tile: gemm_roles.time_of(like, hardware.processors, *tile))


def _seed(variant: str, hardware: Hardware, m: int, n: int, group: int, senders: int = 1, **others: Value) -> Config:
    stages = gemm_roles.most_stages(hardware, m, n, _boxes(m, senders))
    tile = {"block_m": m, "block_n": n, "num_stages": stages, "group_m": group, "senders": senders}
    return Config.of(variant, tile | others)
