"""Search space of `compact`: that of `words`."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.decode_merge import DecodeMerge
from autotax.spaces.decode_merge.blocks import at_once


def space(problem: DecodeMerge, hardware: Hardware) -> VariantSpace | None:
    """None for float32, which 15-bit columns cannot represent, and for very many rows."""
    return None if problem.item_size == 4 else at_once("compact", problem, hardware, 4, 32)
