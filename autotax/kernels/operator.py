"""A variant made ready on one rank: workspaces allocated once, then called as often as one likes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from torch import Tensor

from autotax.config import Config
from autotax.kernels.context import Context, note_of
from autotax.problem import Problem

P = TypeVar("P", bound=Problem)


class Operator(ABC, Generic[P]):
    """One (problem, config) on one rank.

    Construction is collective (all ranks allocate alike) and must be followed by `heap.check()` before the first call.
    A call takes the operator's input tensors and the output tensor, contiguous, at addresses that are multiples of 16, of
    the problem's dtype; it enqueues on the current stream, allocates nothing and never waits on the host, so it can be captured in a graph. Every rank must call
    equally often, in the same order. Inputs may differ from call to call and are free again in stream order.
    """

    def __init__(self, problem: P, config: Config, context: Context) -> None:
        self.problem = problem
        self.config = config
        self.context = context
        self.control = context.control()

    @abstractmethod
    def __call__(self, *tensors: Any, **_: Any) -> Tensor | None:
        """Enqueues one call: inputs, then the output. Returns the result if it is not in the output tensor."""

    def failure(self) -> str | None:
        """What went wrong inside the kernels so far, or None. Waits for the device. Afterwards the operator is unusable."""
        return note_of(self.control, self.context.rank)
