"""push: every rank stores its heads in the inboxes of the others, then a flag. A second launch copies them to the output.

Why every wait ends: in the first launch one program per source waits, after it has sent. Fewer programs wait than there are
ranks, so all the others find room, and they do not wait. When the second launch begins, all data have arrived.

The inbox is [2, source, batch, heads of a rank, head_dim]; the parity of the call selects the slot. A rank overwrites a slot two
calls later. In the call in between it waits for the flags of every peer, and each peer raised those after it had finished reading
the slot. All senders of a source raise the same flag of a rank, once per call, even if they have nothing to send.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.context import Context
from autotax.kernels.kernel import VECTOR_BYTES, Kernel
from autotax.kernels.primitives import EPOCH, copy, flag_address, leave, signal, translate, wait
from autotax.operators.head_gather import HeadGather


@triton.jit(do_not_specialize=["rank", "tokens"])
def push_kernel(
    q, inbox, flags, bases, control, rank, tokens, room,
    WORLD: tl.constexpr, SENDERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """SENDERS programs per peer share the tokens, of WIDTH elements each; `room` is the capacity of an inbox slot per source."""
    epoch = tl.load(control + EPOCH)
    hop = tl.program_id(0) // SENDERS + 1
    part = tl.program_id(0) % SENDERS
    peer = (rank + hop) % WORLD
    per = tl.cdiv(tokens, SENDERS)
    start = tl.minimum(part * per, tokens)
    end = tl.minimum(start + per, tokens)
    slot = (epoch & 1) * WORLD + rank
    there = translate(inbox, bases, rank, peer) + slot.to(tl.int64) * room
    copy(there, q, start * WIDTH, end * WIDTH, BLOCK, ALIGNED)
    signal(flag_address(flags, rank, bases, rank, peer), 1, TARGET, "sys")
    if part == SENDERS - 1:
        source = (rank + WORLD - hop) % WORLD
        wait(flags + source, epoch * SENDERS, source, source, control, TARGET)


@triton.jit(do_not_specialize=["rank"])
def place_kernel(
    q, inbox, out, control, rank, room,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program per token and source."""
    epoch = tl.load(control + EPOCH)
    token = tl.program_id(0) // WORLD
    source = tl.program_id(0) % WORLD
    start = token * WIDTH
    there = out + token.to(tl.int64) * ((WORLD - 1) * WIDTH) + source * WIDTH  # destination of the element at offset `start`
    if source == rank:
        copy(there, q, start, start + WIDTH, BLOCK, ALIGNED)
    else:
        slot = ((epoch & 1) * WORLD + source).to(tl.int64)
        copy(there, inbox + slot * room, start, start + WIDTH, BLOCK, ALIGNED)
    leave(control, epoch, tl.num_programs(0), TARGET)


class Push(Kernel[HeadGather]):
    def __init__(self, problem: HeadGather, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        vector = VECTOR_BYTES // problem.item_size
        self.width = problem.own_heads * problem.head_dim
        self.room = ceil_div(problem.batch * self.width, vector) * vector
        self.inbox = context.heap.alloc((2, problem.world_size, self.room), context.dtype(problem))
        self.flags = context.flags(problem.world_size)
        aligned = vector if self.width % vector == 0 else 1
        self.how = {"WIDTH": self.width, "ALIGNED": aligned, "BLOCK": config["block"], "num_warps": config["num_warps"]}

    def __call__(self, q: Tensor, out: Tensor) -> None:
        context, world, tokens = self.context, self.problem.world_size, self.problem.batch
        if world > 1:
            context.launch(
                push_kernel, ((world - 1) * self.config["senders"],),
                q, self.inbox, self.flags, context.heap.bases, self.control, context.rank, tokens, self.room,
                WORLD=world, SENDERS=self.config["senders"], **self.how,
            )  # fmt: skip
        context.launch(
            place_kernel, (tokens * world,), q, self.inbox, out, self.control, context.rank, self.room, WORLD=world, **self.how
        )

    def changes_for(self, smaller: HeadGather) -> dict[str, Any]:  # noqa: ARG002
        """Any number of tokens: each call raises every flag, whatever it sends."""
        return {}
