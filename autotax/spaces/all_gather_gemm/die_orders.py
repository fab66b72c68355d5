"""What may vary on GPUs of several dies, each with an L2 of its own: which neighbouring pieces of work a die has."""

from __future__ import annotations

from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm


def for_dies(space: VariantSpace, problem: AllGatherGemm, hardware: Hardware, *, sends: bool = False) -> VariantSpace:
    """The space with `dies`, among which tiles of a wave are shared out. 1 is the order without dies. On AMD, A sharded along M.

    Where the kernel `sends` pieces of its own, `comm_dies` shares out the pieces in the same way, and the programs of a die
    make their `signals` together or each by itself. The last seed has all of these: whether they help depends on the shape.
    """
    if hardware.backend != "rocm" or problem.shard != "m" or hardware.dies == 1:
        return space
    choices: dict[str, tuple[Value, ...]] = {"dies": (1, hardware.dies)}
    if sends:
        choices |= {"comm_dies": (1, hardware.dies), "signals": ("each", "die")}
    whole = Constraint(
        ("splits", "dies"), lambda splits, dies: splits == 1 or dies == 1, "tiles in parts go to whichever program is free"
    )
    usual, most = ({name: values[at] for name, values in choices.items()} for at in (0, 1))
    first = space.seeds[0]
    last: dict[str, Value] = {"splits": 1} if "splits" in space.parameters else {}
    seeds = [Config.of(seed.variant, seed.values | usual) for seed in space.seeds]
    seeds.append(Config.of(first.variant, first.values | last | most))
    return replace(
        space,
        parameters=space.parameters | choices,
        constraints=(*space.constraints, *([whole] if last else ())),
        seeds=tuple(seeds),
    )
