"""Variants of separate launches. bsp, the baseline: splits, local merge, the library's all-gather, merge over ranks.

With output `head_scatter` an all-to-all replaces the all-gather: each rank receives the rows that it owns. In gather and
fine_grained a push replaces the collective: every rank, the sender included, gets the whole partial result of a rank, or the rows
that it owns. Their inbox is that of `exchange`, with one flag per source, which all programs that send to a rank signal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import attend, merge, place, split_kernel, store_partial, store_rows, work_of
from autotax.kernels.flash_decode.shapes import DecodeKernel, Inbox, Shapes
from autotax.kernels.primitives import EPOCH, copy, flag_address, leave, signal, translate, wait
from autotax.operators.flash_decode import FlashDecode


@triton.jit
def merge_kernel(
    o, lse, o_out, lse_out, o_stride, lse_stride,
    PIECES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,  # noqa: ARG001 - every launch gives it
):  # fmt: skip
    """One program merges the PIECES partial results of GROUP rows."""
    first = tl.program_id(0) * GROUP
    merged, merged_lse = merge(o, lse, first, o_stride, lse_stride, PIECES, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    store_partial(merged, merged_lse, o_out, lse_out, first + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit
def merge_for_owners_kernel(
    o, lse, parts, rows, arriving, part,
    PIECES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,  # noqa: ARG001 - every launch gives it
):  # fmt: skip
    """Merges PIECES partial results of GROUP rows into the send buffer of their owner: see `store_part`."""
    first = tl.program_id(0) * GROUP
    merged, merged_lse = merge(o, lse, first, rows * HEAD_DIM, rows, PIECES, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    store_part(merged, merged_lse, parts, first, arriving, part, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit
def split_for_owners_kernel(
    q, k, v, lengths, table, starts, scales, sinks, parts, kv_heads, rows, arriving, part, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, SHARE: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Attention over unsplit KV heads whose query heads belong to one rank; writes straight to the send buffer of that rank."""
    item, split = work_of(tl.program_id(0), tl.num_programs(0), SPLITS, SPLIT_FIRST, CHIPLETS)
    o, lse = attend(
        q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
        GROUP, QUERIES, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, WARPS, TARGET,
    )  # fmt: skip
    first = place(item * GROUP, rows, kv_heads * GROUP, SHARE)
    store_part(o, lse, parts, first, arriving, part, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit
def store_part(
    o, lse, parts, first, arriving, part,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes rows of one owner to parts [world, part]: results of the `arriving` rows that it owns, then their log-sum-exps."""
    parts += (first // arriving).to(tl.int64) * part
    at = first % arriving + tl.arange(0, BLOCK_G)
    store_partial(o, lse, parts, parts + arriving * HEAD_DIM, at, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


class Separate(DecodeKernel):
    """A variant that computes the splits, and merges them, in launches of their own."""

    o: Tensor
    lse: Tensor
    """Partial results of this rank."""
    split_o: Tensor
    split_lse: Tensor
    """Partial results of the splits."""

    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = Shapes.of(problem, config, context.target)

    def attend(self, inputs: list[Tensor | None]) -> None:
        """Enqueues attention over the splits."""
        shapes = self.shapes
        self.context.launch(
            split_kernel, (shapes.items * self.config["splits"],),
            *inputs, self.split_o, self.split_lse, shapes.kv_heads, shapes.rows, self.problem.shard_len, shapes.scale, **shapes.attend,
        )  # fmt: skip

    def merge_splits(self) -> None:
        """Enqueues the merge of the splits."""
        shapes = self.shapes
        self.context.launch(
            merge_kernel, (shapes.rows // shapes.heads,),
            self.split_o, self.split_lse, self.o, self.lse, shapes.rows * self.problem.head_dim, shapes.rows,
            PIECES=self.config["splits"], **shapes.merge,
        )  # fmt: skip


class Bsp(Separate):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shapes, rows, dim, splits, f32 = self.shapes, self.shapes.rows, problem.head_dim, config["splits"], torch.float32
        # One buffer holds o [rows, dim] and then lse [rows], so that one collective sends both.
        self.partial = context.empty((problem.world_size if shapes.scatter else 1, shapes.part), f32)
        self.gathered = context.empty((problem.world_size, shapes.part), f32)
        self.o, self.lse = self.partial[0, : rows * dim], self.partial[0, rows * dim :]
        self.all_lse = self.gathered.view(-1)[shapes.arriving * dim :]
        own = splits > 1 or shapes.scatter
        self.split_o = context.empty((splits, rows, dim), f32) if own else self.o
        self.split_lse = context.empty((splits, rows), f32) if own else self.lse
        self.unused_lse = context.empty((shapes.arriving,), f32)

    def __call__(self, *tensors: Tensor) -> None:
        inputs, out = self.inputs_of(tensors)
        context, shapes = self.context, self.shapes
        if shapes.scatter:
            self._attend_for_owners(inputs)
            context.all_to_all(self.gathered, self.partial)
        else:
            self.attend(inputs)
            if self.config["splits"] > 1:
                self.merge_splits()
            context.all_gather(self.gathered, self.partial)
        context.launch(
            merge_kernel, (shapes.arriving // shapes.heads,),
            self.gathered, self.all_lse, out, self.unused_lse, shapes.part, shapes.part,
            PIECES=self.problem.world_size, **shapes.merge,
        )  # fmt: skip

    def _attend_for_owners(self, inputs: list[Tensor | None]) -> None:
        context, shapes, splits = self.context, self.shapes, self.config["splits"]
        parts = self.partial, shapes.rows, shapes.arriving, shapes.part
        if splits == 1 and shapes.attend["SHARE"] % shapes.attend["GROUP"] == 0:
            context.launch(
                split_for_owners_kernel, (shapes.items,),
                *inputs, self.partial, shapes.kv_heads, *parts[1:], self.problem.shard_len, shapes.scale, **shapes.attend,
            )  # fmt: skip
            return
        self.attend(inputs)
        context.launch(
            merge_for_owners_kernel, (shapes.rows // shapes.heads,),
            self.split_o, self.split_lse, *parts, PIECES=splits, **shapes.merge,
        )  # fmt: skip

    def changes_for(self, smaller: FlashDecode) -> dict[str, Any]:
        """Any number of sequences: the collective is called with the sizes of the call."""
        shapes = Shapes.of(smaller, self.config, self.context.target)
        rows, dim, splits = shapes.rows, smaller.head_dim, self.config["splits"]
        partial, gathered = (
            whole.view(-1)[: len(whole) * shapes.part].view(-1, shapes.part) for whole in (self.partial, self.gathered)
        )
        o, lse = partial[0, : rows * dim], partial[0, rows * dim :]
        own = splits > 1 or shapes.scatter
        return {
            "shapes": shapes, "partial": partial, "gathered": gathered, "o": o, "lse": lse,
            "all_lse": gathered.view(-1)[shapes.arriving * dim :],
            "split_o": self.split_o.view(-1)[: splits * rows * dim].view(splits, rows, dim) if own else o,
            "split_lse": self.split_lse.view(-1)[: splits * rows].view(splits, rows) if own else lse,
        }  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def push_kernel(
    o, lse, inbox_o, inbox_lse, flags, bases, control, rank, arriving,
    WORLD: tl.constexpr, SENDERS: tl.constexpr, SCATTER: tl.constexpr, WAIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """SENDERS programs per destination; each sends a share of o [arriving, head_dim] and lse, with SCATTER of its rows.

    With WAIT the last sender to each destination also waits for one source, after it has sent. So then all have arrived.
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


class Gather(Separate):
    """Our own all-gather replaces that of the library: the push waits until all sources have arrived."""

    WAIT = True

    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        rows, dim, splits = self.shapes.rows, problem.head_dim, config["splits"]
        self.inbox = Inbox.of(problem, config, context, self.shapes)
        self.o, self.lse = context.empty((rows, dim), torch.float32), context.empty((rows,), torch.float32)
        self.split_o = context.empty((splits, rows, dim), torch.float32)
        self.split_lse = context.empty((splits, rows), torch.float32)
        self.flags = context.flags(problem.world_size)

    def __call__(self, *tensors: Tensor) -> None:
        context, shapes, inbox, world = self.context, self.shapes, self.inbox, self.problem.world_size
        inputs, out = self.inputs_of(tensors)
        self.attend(inputs)
        self.merge_splits()
        context.launch(
            push_kernel, (world * self.config["senders"],),
            self.o, self.lse, inbox.o, inbox.lse, self.flags, context.heap.bases, self.control, context.rank, shapes.arriving,
            WORLD=world, WAIT=self.WAIT, **shapes.bulk(self.config),
        )  # fmt: skip
        self.merge_ranks(out)

    def merge_ranks(self, out: Tensor) -> None:
        """Enqueues the merge over the ranks."""
        shapes, inbox = self.shapes, self.inbox
        self.context.launch(
            combine_kernel, (shapes.arriving // shapes.heads,),
            out, inbox.o, inbox.lse, self.control, shapes.arriving, WORLD=self.problem.world_size, **shapes.merge,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def combine_when_arrived_kernel(
    out, inbox_o, inbox_lse, flags, control, rank, arriving, WORLD: tl.constexpr, SENDERS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    first = tl.program_id(0) * GROUP
    for hop in tl.range(0, WORLD, num_stages=1):
        source = (rank + WORLD - hop) % WORLD
        wait(flags + source, epoch * SENDERS, source, source, control, TARGET)
    slot = (epoch & 1) * WORLD
    o, _ = merge(
        inbox_o + slot.to(tl.int64) * arriving * HEAD_DIM, inbox_lse + slot * arriving, first, arriving * HEAD_DIM, arriving,
        WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    store_rows(o, out, first + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    leave(control, epoch, tl.num_programs(0), TARGET)


class FineGrained(Gather):
    """The push of `Gather`, without its barrier: the merge over the ranks waits source by source.

    Why every wait ends: only the last launch waits, for the pushes of all ranks, and pushing programs do not wait.
    """

    WAIT = False

    def merge_ranks(self, out: Tensor) -> None:
        context, shapes, inbox = self.context, self.shapes, self.inbox
        context.launch(
            combine_when_arrived_kernel, (shapes.arriving // shapes.heads,),
            out, inbox.o, inbox.lse, self.flags, self.control, context.rank, shapes.arriving,
            WORLD=self.problem.world_size, SENDERS=self.config["senders"], **shapes.merge,
        )  # fmt: skip
