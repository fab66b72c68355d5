"""gather and fine_grained: our own all-gather, or with `head_scatter` all-to-all, replaces the library's; then the merge.

Rows are stored unchanged in the inbox [2, world, arriving, head_dim]. The parity of the call selects the slot. In gather one flag
per source follows; all senders of that source to a rank raise it, and one program per source waits after it has sent. See
docs/decode-merge.md for why every wait ends and when a slot may be written again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.decode_merge.layout import Held, MergeKernel, inbox_of, load_partial, store_merged
from autotax.kernels.flash_decode.attention import merge, place, store_partial
from autotax.kernels.flash_decode.exchange import distances, push_result
from autotax.kernels.flash_decode.shapes import ELEMENTS
from autotax.kernels.primitives import EPOCH, flag_address, leave, signal, translate, wait
from autotax.operators.decode_merge import DecodeMerge


@triton.jit(do_not_specialize=["lse", "lens", "starts", "sequences", "rows", "lse_token", "lse_head", "rank", "taken"])
def push_kernel(
    o, lse, lens, starts, sequences, rows, heads, lse_token, lse_head, inbox_o, inbox_lse, flags, bases, control, rank, taken, arriving,
    WORLD: tl.constexpr, SENDERS: tl.constexpr, SHARE: tl.constexpr, BASE_E: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """SENDERS programs per destination, this rank included, share the blocks of the `taken` rows that it receives."""
    epoch = tl.load(control + EPOCH)
    hop = tl.program_id(0) // SENDERS + 1
    part = tl.program_id(0) % SENDERS
    peer = (rank + hop) % WORLD
    slot = (epoch & 1) * WORLD + rank
    there_o = translate(inbox_o, bases, rank, peer) + slot.to(tl.int64) * arriving * HEAD_DIM
    there_lse = translate(inbox_lse, bases, rank, peer) + slot * arriving
    for block in tl.range(part, taken // GROUP, SENDERS, num_stages=1):
        at = block * GROUP
        first = at
        if SHARE > 0:
            first = at // SHARE * heads + peer * SHARE + at % SHARE
        mine, sums = load_partial(o, lse, lens, starts, sequences, first, rows, heads, lse_token, lse_head, BASE_E, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
        store_partial(mine, sums, there_o, there_lse, at + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    signal(flag_address(flags, rank, bases, rank, peer), 1, TARGET, "sys")
    if part == SENDERS - 1:
        source = (rank + WORLD - hop) % WORLD
        wait(flags + source, epoch * SENDERS, source, source, control, TARGET)


@triton.jit
def merge_arrived_kernel(
    inbox_o, inbox_lse, out, out_lse, control, arriving,
    WORLD: tl.constexpr, BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    first = tl.program_id(0) * GROUP
    slot = (epoch & 1) * WORLD
    merged, sums = merge(
        inbox_o + slot.to(tl.int64) * arriving * HEAD_DIM, inbox_lse + slot * arriving, first, arriving * HEAD_DIM, arriving,
        WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    store_merged(merged, sums, out, out_lse, first, True, BASE_E, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
    leave(control, epoch, tl.num_programs(0), TARGET)


class Gather(MergeKernel):
    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.inbox = inbox_of(problem, self.layout, context)
        self.flags = context.flags(problem.world_size)

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor, held: Held | None = None) -> None:
        context, layout, world, senders = self.context, self.layout, self.problem.world_size, self.config["senders"]
        context.launch(
            push_kernel, (world * senders,),
            *self.own(o, lse, held), *self.inbox, self.flags, context.heap.bases, self.control, context.rank, self.taken, layout.arriving,
            WORLD=world, SENDERS=senders, SHARE=layout.share, **layout.block, **self.how,
        )  # fmt: skip
        context.launch(
            merge_arrived_kernel, (self.taken // layout.together,),
            *self.inbox, out, merged, self.control, layout.arriving, WORLD=world, **layout.block, **self.how,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lse", "lens", "starts", "sequences", "rows", "lse_token", "lse_head", "rank"])
def push_blocks_kernel(
    o, lse, lens, starts, sequences, rows, heads, lse_token, lse_head, inbox_o, inbox_lse, flags, bases, control, rank, most_rows, arriving,
    WORLD: tl.constexpr, PAYLOAD: tl.constexpr, SHARE: tl.constexpr, BASE_E: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program per block of the `most_rows` rows that the inboxes have room for."""
    epoch = tl.load(control + EPOCH)
    away = distances(bases, rank, WORLD)
    first = tl.program_id(0) * GROUP
    mine, sums = load_partial(o, lse, lens, starts, sequences, first, rows, heads, lse_token, lse_head, BASE_E, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    if SHARE > 0:
        first = place(first, most_rows, heads, SHARE)
    push_result(
        mine, sums, first, inbox_o, inbox_lse, flags, bases, away, epoch, rank, arriving,
        WORLD, False, PAYLOAD, SHARE > 0, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def merge_blocks_kernel(
    inbox_o, inbox_lse, out, out_lse, flags, control, rank, arriving,
    WORLD: tl.constexpr, BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    first = tl.program_id(0) * GROUP
    for hop in tl.range(0, WORLD, num_stages=1):
        source = (rank + WORLD - hop) % WORLD
        index = source * (arriving // GROUP) + first // GROUP
        wait(flags + index, epoch, source, index, control, TARGET)
    slot = (epoch & 1) * WORLD
    merged, sums = merge(
        inbox_o + slot.to(tl.int64) * arriving * HEAD_DIM, inbox_lse + slot * arriving, first, arriving * HEAD_DIM, arriving,
        WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    store_merged(merged, sums, out, out_lse, first, True, BASE_E, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
    leave(control, epoch, tl.num_programs(0), TARGET)


class FineGrained(MergeKernel):
    """A flag follows each block of rows that a rank pushes, and a block is merged when it has arrived from all ranks.

    Every call raises the flag of each (source, block of rows) once; a call of fewer rows sends the missing rows as empty ones.
    """

    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        layout = self.layout
        self.inbox = inbox_of(problem, layout, context)
        self.flags = context.flags(problem.world_size * layout.arriving // layout.together)

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor, held: Held | None = None) -> None:
        context, layout, world = self.context, self.layout, self.problem.world_size
        context.launch(
            push_blocks_kernel, (layout.rows // layout.together,),
            *self.own(o, lse, held), *self.inbox, self.flags, context.heap.bases, self.control, context.rank, layout.rows, layout.arriving,
            WORLD=world, PAYLOAD=ELEMENTS[self.problem.dtype], SHARE=layout.share, **layout.block, **self.how,
        )  # fmt: skip
        context.launch(
            merge_blocks_kernel, (self.taken // layout.together,),
            *self.inbox, out, merged, self.flags, self.control, context.rank, layout.arriving,
            WORLD=world, **layout.block, **self.how,
        )  # fmt: skip
