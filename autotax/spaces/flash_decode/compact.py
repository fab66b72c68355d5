"""Search space of `compact`: that of `resident`."""

from __future__ import annotations

from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import payloads, protocols
from autotax.spaces.flash_decode.resident import all_at_once


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace | None:
    """None where LL packets, or fewer bits than the problem's type, are not allowed on the links."""
    fits = "ll" in protocols(problem) and "packed" in payloads(problem)
    return all_at_once("compact", problem, hardware) if fits else None
