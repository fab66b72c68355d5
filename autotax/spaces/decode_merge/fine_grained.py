"""Search space of `fine_grained`: the rows of a block; each block has a flag."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.operators.decode_merge import DecodeMerge
from autotax.spaces.decode_merge.blocks import rows_for, space_of, together


def space(problem: DecodeMerge, hardware: Hardware) -> VariantSpace:
    """Seeds start with one block per processor, because each block costs a system-wide fence."""
    some = rows_for(problem, hardware, problem.batch * problem.heads)
    firsts: list[dict[str, Value]] = [{"rows": rows} for rows in dict.fromkeys((some, together(problem)[-1], 1))]
    firsts += [first | {"num_warps": 8} for first in firsts[:1]]
    return space_of("fine_grained", problem, hardware, {}, firsts)
