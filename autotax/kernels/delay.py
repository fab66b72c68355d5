"""A wait on the device: how ranks are made to arrive at different times."""

from __future__ import annotations

import time

import triton
import triton.language as tl

from autotax.kernels.context import Context


@triton.jit
def now_ns(TARGET: tl.constexpr):
    """A clock of the device in nanoseconds that runs at the same rate whatever the other clocks do."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    # A counter of 100 MHz.
    ticks = tl.inline_asm_elementwise(
        "s_memrealtime $0\ns_waitcnt vmcnt(0) & lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
    )
    return ticks * 10


@triton.jit(do_not_specialize=["ns"])
def delay_kernel(ns, TARGET: tl.constexpr):
    """One program that does nothing for `ns` nanoseconds; bounded by its polls too, each of which takes longer than one."""
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
