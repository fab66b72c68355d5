"""A barrier of all ranks on the device: what makes the ranks start a timed sample together."""

from __future__ import annotations

import triton
import triton.language as tl

from autotax.kernels.context import Context, note_of
from autotax.kernels.primitives import EPOCH, leave, signal_all, wait


@triton.jit(do_not_specialize=["rank"])
def align_kernel(flags, bases, control, rank, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """One program: signals every peer, then waits for a signal of each."""
    epoch = tl.load(control + EPOCH)
    signal_all(flags, rank, bases, rank, WORLD, False, TARGET)
    for hop in tl.range(1, WORLD, num_stages=1):
        peer = (rank + hop) % WORLD
        wait(flags + peer, epoch, peer, peer, control, TARGET)
    leave(control, epoch, 1, TARGET)


class Aligner:
    """Enqueues device barriers on the current stream. Construction is collective, like an operator's."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.flags = context.flags(context.world.size)
        # A rank whose candidate waits in vain comes late, and says itself who it waited for.
        self.control = context.control(patience=4)

    def failure(self) -> str | None:
        """Why the ranks were not aligned, or None; see Kernel.failure."""
        return note_of(self.control, self.context.rank)

    def __call__(self) -> None:
        context = self.context
        context.launch(
            align_kernel, (1,), self.flags, context.heap.bases, self.control, context.rank, WORLD=context.world.size, num_warps=1
        )
