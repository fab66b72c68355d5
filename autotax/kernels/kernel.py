"""A variant made ready on one rank: workspaces allocated once, then called as often as one likes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.kernels.context import Context, note_of

P = TypeVar("P", bound=Problem)

VECTOR_BYTES = 16
"""What kernels and TMA descriptors rely on at the start of a tensor."""


class Kernel(ABC, Generic[P]):
    """One (problem, config) on one rank.

    Construction is collective (all ranks allocate alike) and must be followed by `heap.check()` before the first call.
    A call takes the operator's input tensors and the output tensor, contiguous, at addresses that are multiples of 16, of
    the problem's dtype. It enqueues on the current stream, allocates nothing and never waits on the host, so it can be captured in
    a graph. Every rank must call equally often, in the same order. Inputs may differ from call to call and are free again in stream order.
    """

    def __init__(self, problem: P, config: Config, context: Context) -> None:
        self.problem = problem
        self.config = config
        self.context = context
        self.control = context.control()

    @abstractmethod
    def __call__(self, *tensors: Any, **_: Any) -> Tensor | None:
        """Enqueues one call: inputs, then the output. Returns the result if it is not in the output tensor."""

    def fitted(self, smaller: P) -> Self | None:
        """This kernel for calls of `smaller`, which is not larger than its own problem: the same flags, epochs and memory, other
        sizes. None if its flags or slots do not allow that. Calls of both may be mixed, in the same order on all ranks.
        """
        if smaller == self.problem:
            return self
        changed = self.changes_for(smaller)
        if changed is None:
            return None
        other = copy.copy(self)
        vars(other).update(changed, problem=smaller)
        return other

    def changes_for(self, smaller: P) -> dict[str, Any] | None:  # noqa: ARG002
        """The attributes that calls of `smaller` need changed, or None where they cannot be.

        A call must signal every flag that it shares with other calls, and no peer may still read what it writes.
        """
        return None

    def failure(self) -> str | None:
        """What went wrong inside the kernels so far, or None. Waits for the device. Afterwards the kernel is unusable."""
        return note_of(self.control, self.context.rank)


def around_the_border(slots: Tensor, elements: int) -> Tensor | None:
    """Two neighbouring slots of `elements` elements, whose border is that of the two larger ones; None if misaligned.

    Slot 0 ends and slot 1 begins at the same place for every size, so slots of different parity never overlap.
    """
    border = slots.numel() // 2
    part = slots.view(-1)[border - elements : border + elements]
    return None if (border - elements) * slots.element_size() % VECTOR_BYTES else part
