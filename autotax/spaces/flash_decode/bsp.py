"""What may vary in `bsp`: its split kernel, and the rows that a merging program takes."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import with_attention


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """One row a program first."""
    return with_attention("bsp", problem, hardware, {}, {"heads": 1})
