"""Search space of `push`: the programs that send to each peer, and the elements that a program copies at a time."""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.space import VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.head_gather import HeadGather

MOST_SENDERS = 32


def space(problem: HeadGather, hardware: Hardware) -> VariantSpace:
    """Seeds start with one sender per token, limited by the number of processors."""
    room = max(1, hardware.processors // max(1, problem.world_size - 1))
    senders = powers_of_two(1, min(MOST_SENDERS, room, problem.batch))
    parameters: dict[str, tuple[Value, ...]] = {
        "senders": senders,
        "block": (512, 1024, 2048, 4096),
        "num_warps": (2, 4, 8) if hardware.on_gpu else (4,),
    }
    seeds = [Config.of("push", senders=n, block=block, num_warps=4) for n in senders[::-1][:2] for block in (1024, 4096)]
    return VariantSpace("push", parameters, (), tuple(seeds))
