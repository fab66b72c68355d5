"""Search space of `bsp`: the split kernel, and the rows per merging program."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import with_attention


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """Seeds start with one row per program."""
    return with_attention("bsp", problem, hardware, {}, {"heads": 1})
