"""Search space of `gather`: the attention core, and the programs that send."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import with_attention


def sending_space(name: str, problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """The space of `gather` or `fine_grained`."""
    senders = powers_of_two(1, min(16, problem.out_rows))
    first: dict[str, Value] = {"heads": 1, "senders": senders[-1]}
    return with_attention(name, problem, hardware, {"senders": senders}, first)


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """Seeds start with the most senders that help."""
    return sending_space("gather", problem, hardware)
