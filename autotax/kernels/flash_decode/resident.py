"""resident: one kernel of three phases, in which LL words carry an all-reduce within the rank and across ranks.

All programs compute attention; then each merges some rows over the splits and pushes them; then it merges these rows of all
ranks. A program finishes each phase before it waits in the next, and all programs are resident at the same time: the launch is
cooperative, so CUDA refuses a grid that does not fit. The interpreter runs programs one after the other, so it gets one.

If a KV head is not split and all its query heads go to the same ranks, the first phase pushes and the second is skipped. The
words of the splits need one slot only: a rank overwrites them in its next launch, when all have been read.

With EARLY (a programmatic dependent launch, from Hopper on) the launch begins while the previous kernel ends. Programs become
resident, then wait for the end of that kernel before they access memory. No counter of finished programs is needed: each program
has its own epoch and advances it at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.context import Context, all_resident, gdc_wait, threads_of
from autotax.kernels.flash_decode.attention import attend, place, places, work_of
from autotax.kernels.flash_decode.exchange import distances, merge_words, push_result, receive_result, store_words
from autotax.kernels.flash_decode.shapes import DecodeKernel, Shapes, chunk_of
from autotax.kernels.primitives import LIMIT
from autotax.operators.flash_decode import FlashDecode


@triton.jit(do_not_specialize=["rank"])
def resident_kernel(
    q, k, v, lengths, table, starts, scales, sinks, out, splits, inbox, bases, control, epochs,
    rank, items, kv_heads, rows, arriving, shard_len, scale,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, SPLIT_CHUNK: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, SHARE: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """A merging program takes one of PARTS column ranges. `splits` are words [SPLITS, rows, head_dim], `epochs` [programs]."""
    DIRECT: tl.constexpr = SPLITS == 1 and SHARE % GROUP == 0
    PART: tl.constexpr = BLOCK_D // PARTS
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    limit = tl.load(control + LIMIT)
    away = distances(bases, rank, WORLD)
    for work in tl.range(program, items * SPLITS, programs, num_stages=1):
        item, split = work_of(tl.cast(work, tl.int32), items, SPLITS, SPLIT_FIRST, CHIPLETS)
        o, lse = attend(
            q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
            GROUP, QUERIES, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, WARPS, TARGET,
        )  # fmt: skip
        if DIRECT:
            first = item * GROUP
            if SHARE > 0:
                first = place(first, rows, kv_heads * GROUP, SHARE)
            push_result(
                o, lse, first, inbox, None, None, bases, away, epoch, rank, arriving,
                WORLD, True, tl.float32, SHARE > 0, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
            )  # fmt: skip
        else:
            at = places(split.to(tl.int64) * rows, item, kv_heads, rows, GROUP, BLOCK_G, SHARE)
            store_words(o, lse, splits, at, epoch, tl.float32, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
    if not DIRECT:
        for block in tl.range(program, rows // HEADS * PARTS, programs, num_stages=1):
            first, part = block // PARTS * HEADS, block % PARTS
            merged, merged_lse = merge_words(
                splits + part * PART, tl.cast(first, tl.int64), rows, epoch, rank, control, limit,
                False, tl.float32, SPLITS, SPLIT_CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
            )  # fmt: skip
            push_result(
                merged, merged_lse, first, inbox + part * PART, None, None, bases, away, epoch, rank, arriving,
                WORLD, True, tl.float32, SHARE > 0, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
            )  # fmt: skip
    for block in tl.range(program, arriving // HEADS * PARTS, programs, num_stages=1):
        first, part = block // PARTS * HEADS, block % PARTS
        receive_result(
            out + part * PART, first, inbox + part * PART, None, None, control, limit, epoch, rank, arriving,
            WORLD, True, tl.float32, CHUNK, HEADS, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
        )  # fmt: skip
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + program, epoch + 1)


class Resident(DecodeKernel):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config, context.target)
        rows, dim, splits, parts = shapes.rows, problem.head_dim, config["splits"], config["parts"]
        threads = threads_of(context, config["num_warps"])
        # Zeros carry the tag of call 0. Calls start at 1, so they never match.
        self.splits = context.empty((splits, rows, dim), torch.int64).zero_()
        self.inbox = context.heap.zeros((2, problem.world_size, shapes.arriving, dim), torch.int64)
        room = config["per_processor"] * context.processors
        useful = max(shapes.items * splits, rows // shapes.heads * parts)
        self.programs = 1 if context.interpreted else min(room, useful)
        self.epochs = context.empty((self.programs,), torch.int32).fill_(1)
        early = context.hardware.launches_overlap
        self.options = all_resident(context)
        part = shapes.attend["BLOCK_D"] // parts
        self.merge = {
            "SPLIT_CHUNK": chunk_of(splits, shapes.heads, part, threads),
            "CHUNK": chunk_of(problem.world_size, shapes.heads, part, threads), "PARTS": parts, "EARLY": early,
        }  # fmt: skip

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes = self.problem, self.context, self.shapes
        inputs, out = self.inputs_of(tensors)
        context.launch(
            resident_kernel, (self.programs,),
            *inputs, out, self.splits, self.inbox, context.heap.bases, self.control, self.epochs,
            context.rank, shapes.items, shapes.kv_heads, shapes.rows, shapes.arriving, problem.shard_len, shapes.scale,
            WORLD=problem.world_size, HEADS=shapes.heads, BLOCK_H=power_of_two(shapes.heads), **self.merge, **shapes.attend,
            **self.options,
        )  # fmt: skip
