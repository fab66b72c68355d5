"""Search space of `gather`: the programs that send to each rank, and the blocks of both kernels."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.decode_merge import DecodeMerge
from autotax.spaces.decode_merge.blocks import rows_for, space_of

MOST_SENDERS = 64
"""Most programs that send to one rank."""


def space(problem: DecodeMerge, hardware: Hardware) -> VariantSpace:
    """Seeds start with as many senders as the processors have room for."""
    arriving = problem.batch * problem.out_heads
    room = max(2, hardware.processors // problem.world_size)
    senders = powers_of_two(1, max(1, min(MOST_SENDERS, room, arriving)))
    some = rows_for(problem, hardware, arriving)
    many = dict.fromkeys((senders[-1], senders[len(senders) // 2]))
    firsts: list[dict[str, Value]] = [{"rows": rows, "senders": n} for n in many for rows in dict.fromkeys((1, some))]
    return space_of("gather", problem, hardware, {"senders": senders}, firsts)
