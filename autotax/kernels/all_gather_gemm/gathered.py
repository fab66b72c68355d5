"""Hands out the gathered A: copies the inbox of a kernel and this rank's shard after the call.

The copy must be complete before a peer writes into the slot again. With two slots it is. A peer writes the slot two calls later,
after it has received this rank's shard of the call in between. This rank sends that shard after the copy.

`copy_engine` hands out nothing: it has one slot, and peers may write it once its kernel has ended. The pulling
variants hand out nothing either: they have no inbox.
"""

from __future__ import annotations

from copy import copy as duplicate
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.gemm import element_alignment
from autotax.kernels.primitives import EPOCH, copy
from autotax.operators.all_gather_gemm import operator
from autotax.operators.inputs import DTYPES
from autotax.operators.scaled import as_words

COPY_ELEMENTS = 8192


@triton.jit(do_not_specialize=["rank", "slot"])
def hand_out_kernel(
    a, inbox, whole, control, rank, slot, size, room,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,  # noqa: ARG001 - every launch passes it
):  # fmt: skip
    """whole[source] = the `size` elements that `source` sent in the last call; for this rank, A itself.

    A negative `slot` stands for the slot of the last call's epoch. Sources are `room` elements apart within a slot.
    """
    source = tl.program_id(1)
    if slot < 0:
        slot = (tl.load(control + EPOCH) - 1) & 1
    start = tl.program_id(0) * BLOCK
    end = tl.minimum(start + BLOCK, size)
    destination = whole + source.to(tl.int64) * size
    if source == rank:
        copy(destination, a, start, end, BLOCK, ALIGNED)
    else:
        copy(destination, inbox + (slot * tl.num_programs(1) + source).to(tl.int64) * room, start, end, BLOCK, ALIGNED)


def hands_out(kernel: Any) -> bool:
    """Whether the gathered A of a call of this kernel can be copied after the call."""
    return left_in(kernel) in ("inbox", "inboxes")


def left_in(kernel: Any) -> str:
    """The workspace that holds the gathered A after a call, as declared by the kernel's variant."""
    return operator.variants[kernel.config.variant].leaves


def hand_out(kernel: Any, a: Tensor, whole: Tensor) -> None:
    """Copies the A that the last call of `kernel`, with `a` [rows, k], has gathered to `whole` [world size * rows, k]."""
    problem, context = kernel.problem, kernel.context
    size = a.numel()
    inbox, slot, slots = kernel.inbox, -1, 2
    if left_in(kernel) == "inboxes":  # in a kernel fitted to fewer rows the slots stay as far apart as before
        inbox, slot, slots = inbox[(kernel.calls - 1) % 2], 0, 1
    room = inbox.numel() // (slots * problem.world_size)
    context.launch(
        hand_out_kernel, (ceil_div(size, COPY_ELEMENTS), problem.world_size), a, inbox, whole, kernel.control,
        context.rank, slot, size, room, BLOCK=COPY_ELEMENTS, ALIGNED=element_alignment(problem), num_warps=8,
    )  # fmt: skip


# Access to the gathered A of a call, for callers that also use A itself or multiply it by more than one B.

def keeps_gathered(kernel: Any) -> bool:
    """Whether a kernel can return the gathered A of its last call."""
    if kernel.problem.shard == "k":
        return left_in(kernel) == "whole" or (left_in(kernel) == "inboxes" and kernel.whole)
    return bool(left_in(kernel))


def gathered_codes(kernel: Any, a: Tensor, scales_a: Tensor) -> tuple[Tensor, Tensor]:
    """A [m, k] in e4m3 and its scales as the last call, of `a`, has gathered them, perhaps in workspaces. Not for `block`."""
    if not hasattr(kernel, "gathered_scales"):
        codes: tuple[Tensor, Tensor] = kernel.gathered_codes(a, scales_a)
        return codes
    by_words = duplicate(kernel)
    by_words.problem = as_words(kernel.problem)
    whole = gathered(by_words, a.view(DTYPES[kernel.problem.result]), own=False)
    return whole.view(a.dtype), kernel.gathered_scales(scales_a)


def keeps_codes(kernel: Any) -> bool:
    """Whether a kernel for e4m3 can return the gathered A of its last call."""
    return hasattr(kernel, "gathered_codes") or hasattr(kernel, "gathered_scales")


def gathered(kernel: Any, a: Tensor, *, own: bool) -> Tensor:
    """The A [m, k] that the last call gathered from shards like `a`. With `own` a new tensor, else perhaps a workspace."""
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
