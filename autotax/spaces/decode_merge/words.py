"""Search space of `words`: the blocks, the number of programs that share a row, and the programs per processor."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.decode_merge import DecodeMerge
from autotax.spaces.decode_merge.blocks import at_once


def space(problem: DecodeMerge, hardware: Hardware) -> VariantSpace | None:
    """None for many rows."""
    return at_once("words", problem, hardware, 1, 16)
