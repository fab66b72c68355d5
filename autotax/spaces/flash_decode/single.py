"""What may vary in `single`: the attention core, how results travel, and the programs that receive."""

from __future__ import annotations

from autotax.config import Value
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import exchange, rows_together, shared_among, waiting_programs, with_attention
from autotax.spaces.space import VariantSpace, powers_of_two


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace | None:
    """None where whoever finishes a KV head would have to send to several owners."""
    if rows_together(problem) < problem.group:
        return None
    few = waiting_programs(hardware)
    receivers = powers_of_two(1, min(few, problem.out_rows))
    parameters, sent = exchange(problem, hardware)
    first: dict[str, Value] = shared_among(problem, few) | {"receivers": receivers[-1]}
    return with_attention("single", problem, hardware, {"receivers": receivers} | parameters, *(first | way for way in sent))
