"""Search space of `bsp`: the collective, and the blocks of the kernels before and after it."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.decode_merge import DecodeMerge
from autotax.spaces.decode_merge.blocks import rows_for, space_of


def space(problem: DecodeMerge, hardware: Hardware) -> VariantSpace:
    """Seeds start with an all-to-all where each row has one owner."""
    scattered = problem.output == "head_scatter"
    ways: tuple[Value, ...] = ("all_to_all", "all_gather") if scattered else ("all_gather",)
    some = rows_for(problem, hardware, problem.batch * problem.out_heads)
    firsts: list[dict[str, Value]] = [{"rows": n, "collective": way} for way in ways for n in dict.fromkeys((1, some))]
    return space_of("bsp", problem, hardware, {"collective": ways}, firsts)
