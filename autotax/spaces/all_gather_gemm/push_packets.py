"""What may vary in `push_packets`: tiles of few rows, parts along K, and words that a program looks at together."""

from __future__ import annotations

from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm import tiles
from autotax.spaces.all_gather_gemm.push_words import MOST_ROWS

VARIANT = "push_packets"
WORD_BYTES = 4
HAS_PUSH_WORDS = "cuda:90"
"""The target that has `push_words`, where blocks of B are loaded while words come in: there it is not searched beside that."""
PIECES = (1024, 2048)
"""Words: at least as many as a program has threads, since a smaller tile may be loaded twice."""
WIDEST = 128
"""Columns of a tile. Few rows ask for many narrow ones."""
HIGHEST = 128
"""Rows of the tiles of seeds."""
SHAPES = ((64, 128, 4, 4), (32, 128, 5, 4), (128, 64, 4, 4), (64, 64, 5, 4), (128, 128, 3, 8))
"""Columns of a tile, steps of K, stages and warps of seeds, as high as there are rows: narrow, so that every processor reads its
share of B.
"""


def one_shard(problem: AllGatherGemm) -> AllGatherGemm:
    """The problem of the product, which begins when all of A is there: whose rows they were makes no difference any more."""
    return replace(problem, shard="m", world_size=1)


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """None for many rows, for rows of a shard that are no whole words, and where warps with roles do the same."""
    whole = problem.shard_cols * problem.item_size % WORD_BYTES == 0 and problem.weight == "nk"
    if problem.m > MOST_ROWS or not whole or hardware.target == HAS_PUSH_WORDS:
        return None
    product = one_shard(problem)
    usual = tiles.tile_parameters(product, hardware)
    allowed: dict[str, tuple[Value, ...]] = {
        **usual,
        "block_n": tuple(n for n in usual["block_n"] if int(n) <= WIDEST),
        "group_m": (1, 8),
        **tiles.split_parameters(product, hardware),
        "piece": PIECES,
    }
    constraints = (*tiles.tile_constraints(product, hardware), *tiles.split_constraints(product, hardware))
    found = VariantSpace(VARIANT, allowed, constraints)
    return replace(found, seeds=_seeds(product, hardware, found))


def _seeds(product: AllGatherGemm, hardware: Hardware, space: VariantSpace) -> tuple[Config, ...]:
    """Tiles with as many stages as fit, whole or in parts, whichever takes fewer waves; then the same with longer pieces."""
    allowed = space.parameters
    high = min(HIGHEST, int(allowed["block_m"][-1]))
    found: dict[Config, None] = {}
    for piece in allowed["piece"]:
        for n, k, stages, warps in SHAPES:
            values: dict[str, Value] = {name: choices[0] for name, choices in allowed.items()}
            values |= {
                "block_m": high,
                "block_n": min(n, int(allowed["block_n"][-1])),
                "block_k": min(k, int(allowed["block_k"][-1])),
                "num_warps": warps if warps in allowed["num_warps"] else allowed["num_warps"][0],
                "piece": piece,
            }
            number = tiles.count_tiles(product, high, int(values["block_n"]))
            values["splits"] = tiles.best_splits(number, hardware.processors, allowed["splits"], tiles.COSTS_OF_PARTS[1])
            usual = [each for each in reversed(allowed["num_stages"]) if int(each) <= stages]
            configs = (Config.of(VARIANT, values | {"num_stages": each}) for each in usual)
            fitting = next((config for config in configs if space.why_not(config) is None), None)
            if fitting:
                found[fitting] = None
    return tuple(found)
