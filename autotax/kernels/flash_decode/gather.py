"""The bulk push that `gather` and `fine_grained` share: every rank, the sender included, gets the whole partial result of a rank,
or with output `head_scatter` the rows that it owns.

The inbox is that of `exchange`, with one flag per source. All programs that send to a rank signal the same flag.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import merge, split_kernel, store_rows
from autotax.kernels.flash_decode.bsp import merge_kernel
from autotax.kernels.flash_decode.shapes import DecodeKernel, Inbox, Shapes
from autotax.kernels.primitives import EPOCH, copy, flag_address, leave, signal, translate, wait
from autotax.operators.flash_decode import FlashDecode


@triton.jit(do_not_specialize=["rank"])
def push_kernel(
    o, lse, inbox_o, inbox_lse, flags, bases, control, rank, arriving,
    WORLD: tl.constexpr, SENDERS: tl.constexpr, SCATTER: tl.constexpr, WAIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """SENDERS programs per destination; each sends a share of o [arriving, head_dim] and lse [arriving]. With SCATTER, o and lse
    hold the rows of all destinations one after the other.

    With WAIT the last sender to each destination also waits for one source, after it has sent. So the launch ends when all
    sources have arrived.
    """
    epoch = tl.load(control + EPOCH)
    hop = tl.program_id(0) // SENDERS + 1
    part = tl.program_id(0) % SENDERS
    peer = (rank + hop) % WORLD
    if SCATTER:
        o += peer.to(tl.int64) * arriving * HEAD_DIM
        lse += peer * arriving
    per = tl.cdiv(arriving, SENDERS)
    start = tl.minimum(part * per, arriving)
    end = tl.minimum(start + per, arriving)
    slot = (epoch & 1) * WORLD + rank
    there_o = translate(inbox_o, bases, rank, peer) + slot.to(tl.int64) * arriving * HEAD_DIM
    copy(there_o, o, start * HEAD_DIM, end * HEAD_DIM, BLOCK, ALIGNED)
    copy(translate(inbox_lse, bases, rank, peer) + slot * arriving, lse, start, end, BLOCK, 1)
    signal(flag_address(flags, rank, bases, rank, peer), 1, TARGET, "sys")
    if WAIT:
        if part == SENDERS - 1:
            source = (rank + WORLD - hop) % WORLD
            wait(flags + source, epoch * SENDERS, source, source, control, TARGET)


# gather: our own all-gather replaces that of the collective library. Split, local merge, push and wait, merge over the ranks.

@triton.jit
def combine_kernel(
    out, inbox_o, inbox_lse, control, arriving, WORLD: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    first = tl.program_id(0) * GROUP
    slot = (epoch & 1) * WORLD
    o, _ = merge(
        inbox_o + slot.to(tl.int64) * arriving * HEAD_DIM, inbox_lse + slot * arriving, first, arriving * HEAD_DIM, arriving,
        WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    store_rows(o, out, first + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    leave(control, epoch, tl.num_programs(0), TARGET)


class Gather(DecodeKernel):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config, context.target)
        rows, dim, splits, f32 = shapes.rows, problem.head_dim, config["splits"], torch.float32
        self.inbox = Inbox.of(problem, config, context, shapes)
        self.o = context.empty((rows, dim), f32)
        self.lse = context.empty((rows,), f32)
        self.split_o = context.empty((splits, rows, dim), f32)
        self.split_lse = context.empty((splits, rows), f32)
        self.flags = context.flags(problem.world_size)

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes, inbox = self.problem, self.context, self.shapes, self.inbox
        inputs, out = self.inputs_of(tensors)
        rows, dim, splits, world = shapes.rows, problem.head_dim, self.config["splits"], problem.world_size
        context.launch(
            split_kernel,
            (shapes.items * splits,),
            *inputs, self.split_o, self.split_lse, shapes.kv_heads, rows, problem.shard_len, shapes.scale,
            **shapes.attend,
        )  # fmt: skip
        merging = (rows // shapes.heads,)
        context.launch(
            merge_kernel, merging, self.split_o, self.split_lse, self.o, self.lse, rows * dim, rows,
            PIECES=splits, **shapes.merge,
        )  # fmt: skip
        context.launch(
            push_kernel, (world * self.config["senders"],),
            self.o, self.lse, inbox.o, inbox.lse, self.flags, context.heap.bases, self.control, context.rank, shapes.arriving,
            WORLD=world, WAIT=True, **shapes.bulk(self.config),
        )  # fmt: skip
        context.launch(
            combine_kernel, (shapes.arriving // shapes.heads,),
            out, inbox.o, inbox.lse, self.control, shapes.arriving, WORLD=world, **shapes.merge,
        )  # fmt: skip
