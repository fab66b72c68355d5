"""What may vary in `fused`: the attention core, and how results travel."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import exchange, with_attention


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """One row a program first."""
    parameters, sent = exchange(problem, hardware)
    one: dict[str, Value] = {"heads": 1}
    return with_attention("fused", problem, hardware, parameters, *(one | way for way in sent))
