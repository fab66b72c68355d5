"""The calls of all ranks for one seed, and the output that each rank must produce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch

from autotax.core.problem import Problem
from autotax.operators import registry
from autotax.operators.inputs import DTYPES, EIGHT_BITS, Call, Draw
from autotax.operators.verification import Expected


@dataclass(frozen=True)
class Calls(Sequence[Call]):
    """The inputs of every rank. Each access draws them anew, because the inputs of all ranks may not fit in memory together."""

    problem: Problem
    seed: int
    device: torch.device

    def __len__(self) -> int:
        return self.problem.world_size

    @overload
    def __getitem__(self, rank: int) -> Call: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Call]: ...
    def __getitem__(self, rank: int | slice) -> Call | list[Call]:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        return make_inputs(self.problem, self.seed, rank, self.device)


def make_inputs(problem: Problem, seed: int, rank: int, device: torch.device) -> Call:
    """The inputs of `rank` for a seed, and a buffer for its output."""
    return registry.of(problem).draw(problem, Draw((DTYPES | EIGHT_BITS)[problem.dtype], seed, rank, device))


def reference(problem: Problem, seed: int, rank: int, device: torch.device) -> Expected:
    """The right output of `rank` for a seed."""
    (right, spread), *more = registry.of(problem).right(problem, Calls(problem, seed, device), rank)
    # Scales are their own spread: each follows the largest of rounded numbers, so it may be off by one step.
    others = tuple(Expected.of(*other, DTYPES[problem.dtype], step=other[0] is other[1]) for other in more)
    return Expected.of(right, spread, (DTYPES | EIGHT_BITS)[problem.out_dtype], others)
