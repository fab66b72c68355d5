"""Handing out what a call has gathered: the inbox of its kernel, and the own shard, copied behind the call.

The copy must be over before a peer writes into the slot again. With two slots it is: a peer does so two calls later, after this
rank's shard of the call between has reached it, and this rank sends that behind the copy. `copy_engine` has one slot, which peers may
write once its kernel has ended, and the pulling variants have no inbox: they hand out nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.tiles import element_alignment
from autotax.kernels.primitives import EPOCH, copy
from autotax.operators.all_gather_gemm import operator

COPY_ELEMENTS = 8192


@triton.jit(do_not_specialize=["rank", "slot"])
def hand_out_kernel(
    a, inbox, whole, control, rank, slot, size, room,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,  # noqa: ARG001 - every launch gives it
):  # fmt: skip
    """whole[source] = what `source` has sent in the last call, `size` elements; of this rank, A itself.

    The slot is that of the last call's epoch, unless it is given. `room` elements lie between the sources of a slot.
    """
    source = tl.program_id(1)
    if slot < 0:
        slot = (tl.load(control + EPOCH) - 1) & 1
    start = tl.program_id(0) * BLOCK
    end = tl.minimum(start + BLOCK, size)
    there = whole + source.to(tl.int64) * size
    if source == rank:
        copy(there, a, start, end, BLOCK, ALIGNED)
    else:
        copy(there, inbox + (slot * tl.num_programs(1) + source).to(tl.int64) * room, start, end, BLOCK, ALIGNED)


def hands_out(kernel: Any) -> bool:
    """Whether what a call of this kernel has gathered can be copied behind it."""
    return left_in(kernel) in ("inbox", "inboxes")


def left_in(kernel: Any) -> str:
    """The workspace in which the gathered A stays, as the declaration of the kernel's variant says."""
    return operator.variants[kernel.config.variant].leaves


def hand_out(kernel: Any, a: Tensor, whole: Tensor) -> None:
    """`whole` [world size * rows, k] = what the call of `kernel` with `a` [rows, k], enqueued just before, has gathered."""
    problem, context = kernel.problem, kernel.context
    size = a.numel()
    inbox, slot, slots = kernel.inbox, -1, 2
    if left_in(kernel) == "inboxes":  # fitted to fewer rows, its slots lie as far apart as before
        inbox, slot, slots = inbox[(kernel.calls - 1) % 2], 0, 1
    room = inbox.numel() // (slots * problem.world_size)
    context.launch(
        hand_out_kernel, (ceil_div(size, COPY_ELEMENTS), problem.world_size), a, inbox, whole, kernel.control,
        context.rank, slot, size, room, BLOCK=COPY_ELEMENTS, ALIGNED=element_alignment(problem), num_warps=8,
    )  # fmt: skip


# The gathered A that a call leaves behind, for callers that want it too, or multiply it by more than one B.

def keeps_gathered(kernel: Any) -> bool:
    """Whether the gathered A of the last call can be had from a kernel."""
    if kernel.problem.shard == "k":
        return left_in(kernel) == "whole" or (left_in(kernel) == "inboxes" and kernel.whole)
    return bool(left_in(kernel))


def gathered(kernel: Any, a: Tensor, *, own: bool) -> Tensor:
    """A [m, k] as the last call gathered it, whose shard was `a`. With `own` in memory of its own, else perhaps a workspace."""
    problem = kernel.problem
    if left_in(kernel) in ("whole", "landing"):
        whole: Tensor = getattr(kernel, left_in(kernel))
    elif problem.shard == "k":
        whole = kernel.inbox[(kernel.calls - 1) % 2].view(-1, problem.k)
    else:
        whole = a.new_empty(problem.world_size * len(a), problem.k)
        hand_out(kernel, a, whole)
        return whole[: problem.m]
    whole = whole[: problem.m]
    return whole.clone() if own else whole
