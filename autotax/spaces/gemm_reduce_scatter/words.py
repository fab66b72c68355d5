"""Search space of `words`: tiles of few rows, split-K, and the number of trips for a replicated output."""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces.all_gather_gemm import tiles as gemm
from autotax.spaces.gemm_reduce_scatter.tiles import gathered, parameters

MOST_ROWS = 256
"""Most rows of C. With more, eight bytes for each four or two bytes of data cost more than flags."""
MOST_BLOCK_M = 64
ONE_SHOT_BYTES = 2 << 20
"""Seeds start with one trip if a rank sends at most this many bytes in it, else with two."""


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """None for many rows."""
    rows = problem.world_size * problem.shard_rows
    if rows > MOST_ROWS:
        return None
    usual = parameters(problem, hardware)
    high = min(MOST_BLOCK_M, power_of_two(max(16, rows)))
    allowed: dict[str, tuple[Value, ...]] = {
        "block_m": powers_of_two(16, high),
        "block_n": tuple(n for n in usual["block_n"] if int(n) <= 128),
        "block_k": usual["block_k"],
        "num_warps": usual["num_warps"],
        "num_stages": (2, 3, 4, 5, 6, 8) if hardware.on_gpu else (2,),
        "group_m": (1, 8),
        "loads": usual["loads"],
        "splits": _splits(problem, hardware),
        "payload": usual["payload"],
        "shots": ("one", "two") if problem.output == "replicated" and problem.world_size > 1 else ("one",),
    }
    registers, tile, *_ = gemm.tile_constraints(gathered(problem), hardware)
    left = Constraint(
        ("block_m", "block_n", "splits"),
        lambda m, n, splits: splits == 1 or _tiles(problem, m, n) % hardware.processors != 0,
        "the tiles fill whole waves, so that none is left to cut",
    )
    return VariantSpace("words", allowed, (registers, tile, left), _seeds(problem, hardware, allowed, (registers, tile, left)))


def _tiles(problem: GemmReduceScatter, block_m: int, block_n: int) -> int:
    rows = problem.world_size * problem.shard_rows if problem.output == "scattered" else problem.m
    return ceil_div(rows, block_m) * ceil_div(problem.n, block_n)


def _splits(problem: GemmReduceScatter, hardware: Hardware) -> tuple[Value, ...]:
    blocks = ceil_div(problem.k, 128)
    return tuple(s for s in ((1, 2, 3, 4, 6, 8) if hardware.on_gpu else (1, 2, 3)) if s <= blocks)


def _seeds(
    problem: GemmReduceScatter, hardware: Hardware, allowed: dict[str, tuple[Value, ...]], constraints: tuple[Constraint, ...]
) -> tuple[Config, ...]:
    """Tiles with all the rows, narrow or split along K so that every processor reads a share of B."""
    sent = (problem.world_size - 1) * problem.m * problem.n * problem.item_size * 2
    shots = allowed["shots"] if sent <= ONE_SHOT_BYTES else allowed["shots"][::-1]
    found: dict[Config, None] = {}
    space = VariantSpace("words", allowed, constraints)
    for shot in shots:
        for n, k, stages, warps in ((64, 128, 5, 4), (32, 128, 6, 4), (128, 64, 5, 4), (64, 64, 8, 4), (64, 128, 3, 4)):
            tile: dict[str, Value] = {
                "block_m": allowed["block_m"][-1],
                "block_n": min(n, int(allowed["block_n"][-1])),
                "block_k": min(k, int(allowed["block_k"][-1])),
                "num_warps": warps,
                "num_stages": max(s for s in allowed["num_stages"] if int(s) <= stages),
                "group_m": 1,
                "loads": allowed["loads"][0],
                "payload": allowed["payload"][0],
                "shots": shot,
            }
            number = _tiles(problem, int(tile["block_m"]), int(tile["block_n"]))
            splits = gemm.best_splits(number, hardware.processors, allowed["splits"], gemm.COSTS_OF_PARTS[1])
            config = Config.of("words", tile | {"splits": splits})
            if space.why_not(config) is None:
                found[config] = None
    return tuple(found)
