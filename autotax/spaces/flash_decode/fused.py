"""Search space of `fused`: the attention core, and the protocol of the exchange."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import exchange, with_attention


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """Seeds start with one row per program."""
    parameters, sent = exchange(problem, hardware)
    one: dict[str, Value] = {"heads": 1}
    return with_attention("fused", problem, hardware, parameters, *(one | way for way in sent))
