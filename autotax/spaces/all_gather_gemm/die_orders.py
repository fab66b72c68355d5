"""Parameters for GPUs of several dies with one L2 each: which neighbouring pieces of work a die gets."""

from __future__ import annotations

from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm


def for_dies(space: VariantSpace, problem: AllGatherGemm, hardware: Hardware, *, sends: bool = False) -> VariantSpace:
    """Adds the parameter `dies`: the tiles of a wave are split among that many dies; 1 ignores dies. Only on AMD, with A sharded
    along M.

    Where the kernel itself `sends` pieces, `comm_dies` splits those pieces among dies in the same way. `signals` says whether the
    programs of a die signal together or one by one. Only the last seed uses these parameters: whether they help depends on the
    shape.
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
