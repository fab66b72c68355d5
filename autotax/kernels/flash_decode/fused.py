"""fused and single: the local merge pushes its own result to every rank; the global merge waits per (source, block of heads).

fused has three kernels: split, merge and push, receive. Only the last waits, for the second one of its peers, which never waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import attend, merge, place, store_partial, work_of
from autotax.kernels.flash_decode.bsp import Separate
from autotax.kernels.flash_decode.exchange import distances, push_result, receive_result
from autotax.kernels.flash_decode.shapes import DecodeKernel, Inbox, Shapes
from autotax.kernels.primitives import EPOCH, LIMIT, count, leave
from autotax.operators.flash_decode import FlashDecode


@triton.jit(do_not_specialize=["rank"])
def merge_push_kernel(
    o, lse, inbox_o, inbox_lse, flags, bases, control, rank, rows, arriving,
    SPLITS: tl.constexpr, WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, SCATTER: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    away = distances(bases, rank, WORLD)
    first = tl.program_id(0) * GROUP
    merged, merged_lse = merge(o, lse, first, rows * HEAD_DIM, rows, SPLITS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    push_result(
        merged, merged_lse, first, inbox_o, inbox_lse, flags, bases, away, epoch, rank, arriving,
        WORLD, LL, PAYLOAD, SCATTER, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def receive_kernel(
    out, inbox_o, inbox_lse, flags, control, rank, arriving,
    WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    limit = tl.load(control + LIMIT)
    first = tl.program_id(0) * GROUP
    receive_result(
        out, first, inbox_o, inbox_lse, flags, control, limit, epoch, rank, arriving,
        WORLD, LL, PAYLOAD, CHUNK, GROUP, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
    )  # fmt: skip
    leave(control, epoch, tl.num_programs(0), TARGET)


class Fused(Separate):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shapes, splits = self.shapes, config["splits"]
        self.split_o = context.empty((splits, shapes.rows, problem.head_dim), torch.float32)
        self.split_lse = context.empty((splits, shapes.rows), torch.float32)
        self.inbox = Inbox.of(problem, config, context, shapes)
        self.flags = context.flags(problem.world_size * shapes.arriving // shapes.heads)

    def __call__(self, *tensors: Tensor) -> None:
        context, shapes, inbox, world = self.context, self.shapes, self.inbox, self.problem.world_size
        inputs, out = self.inputs_of(tensors)
        self.attend(inputs)
        context.launch(
            merge_push_kernel, (shapes.rows // shapes.heads,),
            self.split_o, self.split_lse, inbox.o, inbox.lse, self.flags, context.heap.bases, self.control,
            context.rank, shapes.rows, shapes.arriving, SPLITS=self.config["splits"], WORLD=world, **inbox.push, **shapes.merge,
        )  # fmt: skip
        context.launch(
            receive_kernel, (shapes.arriving // shapes.heads,),
            out, inbox.o, inbox.lse, self.flags, self.control, context.rank, shapes.arriving,
            WORLD=world, **inbox.receive, **shapes.merge,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def single_kernel(
    q, k, v, lengths, table, starts, scales, sinks, out, split_o, split_lse, finished, inbox_o, inbox_lse, flags, bases, control,
    rank, items, kv_heads, rows, arriving, shard_len, scale,
    WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, CHUNK: tl.constexpr,
    RECEIVERS: tl.constexpr, BLOCK_R: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, SHARE: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`finished` int32 [items] counts the splits of a KV head that are done; the last split resets the count to zero."""
    epoch = tl.load(control + EPOCH)
    limit = tl.load(control + LIMIT)
    away = distances(bases, rank, WORLD)
    program = tl.program_id(0)
    senders = items * SPLITS
    if program < senders:
        item, split = work_of(program, items, SPLITS, SPLIT_FIRST, CHIPLETS)
        first = item * GROUP
        if SHARE > 0:  # then all query heads of a KV head belong to one rank
            first = place(first, rows, kv_heads * GROUP, SHARE)
        o, lse = attend(
            q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
            GROUP, QUERIES, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, WARPS, TARGET,
        )  # fmt: skip
        if SPLITS == 1:
            push_result(o, lse, first, inbox_o, inbox_lse, flags, bases, away, epoch, rank, arriving, WORLD, LL, PAYLOAD, SHARE > 0, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)  # fmt: skip
        else:
            store_partial(o, lse, split_o + split.to(tl.int64) * rows * HEAD_DIM, split_lse + split * rows, first + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
            if count(finished + item, TARGET, "gpu") == SPLITS - 1:
                tl.store(finished + item, 0)
                merged, merged_lse = merge(split_o, split_lse, first, rows * HEAD_DIM, rows, SPLITS, GROUP, HEAD_DIM, BLOCK_R, BLOCK_D)
                push_result(merged, merged_lse, first, inbox_o, inbox_lse, flags, bases, away, epoch, rank, arriving, WORLD, LL, PAYLOAD, SHARE > 0, GROUP, HEAD_DIM, BLOCK_R, BLOCK_D, TARGET)  # fmt: skip
    else:
        for block in tl.range(program - senders, arriving // HEADS, RECEIVERS, num_stages=1):
            receive_result(
                out, block * HEADS, inbox_o, inbox_lse, flags, control, limit, epoch, rank, arriving,
                WORLD, LL, PAYLOAD, CHUNK, GROUP, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D, TARGET,
            )  # fmt: skip
    leave(control, epoch, tl.num_programs(0), TARGET)


class Single(DecodeKernel):
    """One kernel. The last program to finish a KV head merges its splits and pushes the result; receivers merge.

    Why every wait ends: only receiving programs wait, and only for split programs of this and other ranks, which do not wait.
    Receivers have the highest program ids and are fewer than the processors, so split programs always find room.
    """

    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config, context.target)
        rows, dim, splits, world = shapes.rows, problem.head_dim, config["splits"], problem.world_size
        self.split_o = context.empty((splits, rows, dim), torch.float32)
        self.split_lse = context.empty((splits, rows), torch.float32)
        self.finished = context.empty((shapes.items,), torch.int32).zero_()
        self.inbox = Inbox.of(problem, config, context, shapes, config["num_warps"])
        self.flags = context.flags(world * shapes.arriving // shapes.attend["GROUP"])

    def __call__(self, *tensors: Tensor) -> None:
        problem, config, context, shapes = self.problem, self.config, self.context, self.shapes
        inputs, out = self.inputs_of(tensors)
        receivers = config["receivers"]
        context.launch(
            single_kernel, (shapes.items * config["splits"] + receivers,),
            *inputs, out, self.split_o, self.split_lse, self.finished,
            self.inbox.o, self.inbox.lse, self.flags, context.heap.bases, self.control,
            context.rank, shapes.items, shapes.kv_heads, shapes.rows, shapes.arriving, problem.shard_len, shapes.scale,
            WORLD=problem.world_size, RECEIVERS=receivers, BLOCK_R=power_of_two(shapes.attend["GROUP"]), HEADS=shapes.heads,
            BLOCK_H=power_of_two(shapes.heads), **self.inbox.receive, **shapes.attend,
        )  # fmt: skip
