"""Tiles of warps with roles, by name, and configs of the kernel that multiplies by them and sends words."""

from __future__ import annotations

from collections.abc import Callable

from autotax.core.config import Config
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


def tile_for(scales: str, tile: str) -> str:
    """The name of a tile. Without scales groups take no turns at the buffers, and there are no strips."""
    rows, columns, stages, warps, strips = tile.split("x")
    if scales == "none":
        warps, strips = str(int(rows) // 16), "1"
    return "roles-" + "x".join((rows, columns, stages, warps, strips))


Usual = Callable[[GemmReduceScatter, str], Config]
"""Gives the default config of a variant, or skips the test on a GPU that lacks it."""


def by_words(problem: GemmReduceScatter, usual: Usual, tile: str, splits: int) -> Config:
    """A config of these sizes."""
    variant = usual(problem, "specialized_words" if problem.scales == "none" else "scaled_specialized_words").variant
    return Config.of(variant, product=tile_for(problem.scales, tile), splits=splits)
