"""Search spaces of head gather, one function per variant."""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware, lanes
from autotax.operators.head_gather import HeadGather

MOST_SENDERS = 32


def push(problem: HeadGather, hardware: Hardware) -> VariantSpace:
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


MOST_WORDS = 1 << 21
"""Most words that a rank sends to another: 16 MiB. With more, the doubled bytes cost more than a flag."""


def words(problem: HeadGather, hardware: Hardware) -> VariantSpace | None:
    """None for many tokens, and for tokens that are not whole words."""
    width = problem.own_heads * problem.head_dim * problem.item_size
    if width % 4 or problem.batch * width // 4 > MOST_WORDS:
        return None
    parameters: dict[str, tuple[Value, ...]] = {
        "block": (128, 256, 512, 1024, 2048),
        "num_warps": (1, 2, 4, 8) if hardware.on_gpu else (4,),
        "per_processor": (1, 2, 4) if hardware.on_gpu else (1,),
    }
    tiles = Constraint(
        ("block", "num_warps"),
        lambda block, warps: lanes(hardware) * warps <= block <= 32 * lanes(hardware) * warps,
        "a tile has fewer words than the program has threads, or more than fit in registers",
    )
    room = Constraint(
        ("num_warps", "per_processor"), lambda warps, programs: warps * programs <= 8, "the programs do not fit in registers"
    )
    ways = ((512, 4, 2), (1024, 4, 1), (256, 2, 4), (2048, 8, 1)) if hardware.on_gpu else ((512, 4, 1),)
    seeds = tuple(Config.of("words", block=block, num_warps=warps, per_processor=programs) for block, warps, programs in ways)
    return VariantSpace("words", parameters, (tiles, room), seeds)
