"""Device code that delays a rank, and a device barrier that aligns the ranks before a timed sample."""

from __future__ import annotations

import time

import triton
import triton.language as tl

from autotax.kernels.context import Context, note_of
from autotax.kernels.primitives import EPOCH, leave, signal_all, wait


@triton.jit
def now_ns(TARGET: tl.constexpr):
    """A device clock in nanoseconds, whose rate does not depend on the clocks of the processors."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    # s_memrealtime counts at 100 MHz.
    ticks = tl.inline_asm_elementwise(
        "s_memrealtime $0\ns_waitcnt vmcnt(0) & lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
    )
    return ticks * 10


@triton.jit(do_not_specialize=["ns"])
def delay_kernel(ns, TARGET: tl.constexpr):
    """One program that does nothing for `ns` nanoseconds, or `ns` polls; each poll takes longer than 1 ns."""
    start = now_ns(TARGET)
    polls = 0
    while (now_ns(TARGET) - start < ns) & (polls < ns):
        polls += 1


def delay(context: Context, us: float) -> None:
    """Enqueues a wait of about `us` microseconds on the current stream; a CPU rank sleeps."""
    if not context.interpreted:
        context.launch(delay_kernel, (1,), round(us * 1000), num_warps=1)
    elif not context.dry:
        time.sleep(us / 1e6)


@triton.jit(do_not_specialize=["rank"])
def align_kernel(flags, bases, control, rank, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """One program: signals every peer, then waits for a signal from each peer."""
    epoch = tl.load(control + EPOCH)
    signal_all(flags, rank, bases, rank, WORLD, False, TARGET)
    for hop in tl.range(1, WORLD, num_stages=1):
        peer = (rank + hop) % WORLD
        wait(flags + peer, epoch, peer, peer, control, TARGET)
    leave(control, epoch, 1, TARGET)


class Aligner:
    """Enqueues device barriers, which make the ranks start a timed sample together. Construction is collective."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.flags = context.flags(context.world.size)
        # A rank whose candidate kernel times out arrives late. With patience 4 that kernel records its own note first.
        self.control = context.control(patience=4)

    def failure(self) -> str | None:
        """Why the ranks were not aligned, or None; see Kernel.failure."""
        return note_of(self.control, self.context.rank)

    def __call__(self) -> None:
        context = self.context
        context.launch(
            align_kernel, (1,), self.flags, context.heap.bases, self.control, context.rank, WORLD=context.world.size, num_warps=1
        )
