"""Search space of `single`: the attention core, the protocol of the exchange, and the receiving programs."""

from __future__ import annotations

from dataclasses import replace

from autotax.core.config import Value
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import by_head, exchange, rows_together, shared_among, waiting_programs, with_attention


def space(problem: FlashDecode, hardware: Hardware) -> VariantSpace | None:
    """None where the heads of one KV head belong to several ranks: one program could not push them all."""
    if rows_together(problem) < problem.group:
        return None
    few = waiting_programs(hardware)
    receivers = powers_of_two(1, min(few, problem.out_rows))
    parameters, sent = exchange(problem, hardware)
    first: dict[str, Value] = shared_among(problem, few) | {"receivers": receivers[-1]}
    found = with_attention("single", problem, hardware, {"receivers": receivers} | parameters, *(first | way for way in sent))
    together = Constraint(
        ("attend", "num_warps"),
        lambda attend, warps: attend != "by_head" or (problem.out_heads * problem.queries) % (problem.group * warps) == 0,
        "KV heads that are one piece of work must have one owner",
    )
    return replace(found, constraints=(*found.constraints, together)) if by_head(problem, hardware) else found
