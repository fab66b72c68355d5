"""Search space of `push_packets`: tiles of few rows, split-K, and the number of words that a program polls together."""

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
"""The target that has `push_words`, which loads blocks of B while words arrive. `push_packets` is not searched there."""
PIECES = (1024, 2048)
"""Words polled together: at least one per thread, since Triton may load a smaller tile twice."""
WIDEST = 128
"""Most columns of a tile. With few rows, many narrow tiles are needed to occupy the processors."""
HIGHEST = 128
"""Most rows of a seed's tile."""
SHAPES = ((64, 128, 4, 4), (32, 128, 5, 4), (128, 64, 4, 4), (64, 64, 5, 4), (128, 128, 3, 8))
"""Seeds: columns of a tile, K per step, stages, warps. A tile has as many rows as the problem, at most HIGHEST. It is narrow, so
that every processor reads a share of B.
"""


def one_shard(problem: AllGatherGemm) -> AllGatherGemm:
    """The same GEMM as a problem with one shard: it starts when all of A has arrived, so the owner of a row does not matter."""
    return replace(problem, shard="m", world_size=1)


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """None for many rows, for shards that are not whole words, and where the warp-specialized `push_words` exists."""
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
    """Tiles with as many stages as fit, with or without split-K, whichever takes fewer waves. Longer pieces follow."""
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
