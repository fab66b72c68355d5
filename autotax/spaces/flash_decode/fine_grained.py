"""Search space of `fine_grained`: that of `gather`."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.gather import sending_space


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """The same space as `gather`."""
    return sending_space("fine_grained", problem, hardware)
