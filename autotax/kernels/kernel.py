"""A variant prepared on one rank: workspaces are allocated once, then it can be called any number of times."""

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
"""Byte alignment of the start of a tensor that kernels and TMA descriptors rely on."""


class Kernel(ABC, Generic[P]):
    """One (problem, config) on one rank.

    Construction is collective (all ranks allocate alike) and must be followed by `heap.check()` before the first call.

    A call takes the operator's input tensors and the output tensor. They are contiguous, have the problem's dtype, and start at
    addresses that are multiples of 16. A call enqueues on the current stream, allocates nothing and never waits on the host, so
    it can be captured in a graph. Every rank must make the same number of calls in the same order. Inputs may differ from call to
    call. They may be overwritten by later work in stream order.
    """

    def __init__(self, problem: P, config: Config, context: Context) -> None:
        self.problem = problem
        self.config = config
        self.context = context
        self.control = context.control()

    @abstractmethod
    def __call__(self, *tensors: Any, **_: Any) -> Tensor | None:
        """Enqueues one call of the inputs, then the output. Returns the result if it is not in the output tensor."""

    def fitted(self, smaller: P) -> Self | None:
        """This kernel for calls of `smaller`, not larger than its own problem: the same flags and memory, but other sizes.

        None if flags or slots do not allow that. Calls of both may be mixed, in the same order on all ranks.
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
        """The attributes to change for calls of `smaller`; None if the kernel does not support them.

        A call must signal every flag that it shares with other calls, and write no memory that a peer may still be reading.
        """
        return None

    def failure(self) -> str | None:
        """The first error inside the kernels, or None. Waits for the device. After an error the kernel is unusable."""
        return note_of(self.control, self.context.rank)


def around_the_border(slots: Tensor, elements: int) -> Tensor | None:
    """Two neighbouring slots of `elements` elements with the same border as the two larger slots; None if misaligned.

    Slot 0 ends and slot 1 begins at the same address for every size, so slots of different parity never overlap.
    """
    border = slots.numel() // 2
    part = slots.view(-1)[border - elements : border + elements]
    return None if (border - elements) * slots.element_size() % VECTOR_BYTES else part
