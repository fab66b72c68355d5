"""compact: `resident` with a quarter of float32's bytes on the links: words of four columns that share a scale (`fixed_point`).

The phases, who waits for whom, and why a program may wait for those of its own launch, are those of `resident`. The splits of the
own rank exchange float32 words as there, for they do not leave the processor's L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from autotax.config import Config
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import attend, place, places, store_rows, work_of
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.flash_decode.fixed_point import merge_columns, pack_columns, pack_heads, scale_of
from autotax.kernels.flash_decode.inbox import chunk_of
from autotax.kernels.flash_decode.shapes import Shapes, inputs_of
from autotax.kernels.flash_decode.words import merge_words, store_words
from autotax.kernels.operator import Operator
from autotax.kernels.primitives import LIMIT
from autotax.problem import FlashDecode, ceil_div, power_of_two


@triton.jit
def push_rows(
    o, lse, first, words, heads, away, epoch, rank, arriving,
    WORLD: tl.constexpr, SCATTER: tl.constexpr, HEADS_A_ROW: tl.constexpr, MINE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP of o [BLOCK_G, BLOCK_D] and lse [BLOCK_G] to all ranks, the own one last; with SCATTER only
    to the rank that owns them all. Each row gets MINE heads: two for each of its parts, or for the one that o is.
    """
    scale = scale_of(o)
    packed = pack_columns(o, scale, epoch, BLOCK_G, BLOCK_D)
    head = pack_heads(scale, lse, epoch)
    if SCATTER:
        peer = first // arriving
        first = first % arriving
        far = tl.cast(0, tl.int64)
        for hop in tl.static_range(WORLD):
            far += tl.where((rank + 1 + hop) % WORLD == peer, away[hop], 0)
        store_at(packed, head, first, far, words, heads, epoch, rank, arriving, WORLD, HEADS_A_ROW, MINE, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    else:
        for hop in tl.static_range(WORLD):
            store_at(
                packed, head, first, away[hop], words, heads, epoch, rank, arriving,
                WORLD, HEADS_A_ROW, MINE, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
            )  # fmt: skip


@triton.jit
def store_at(
    packed, head, first, far, words, heads, epoch, rank, arriving,
    WORLD: tl.constexpr, HEADS_A_ROW: tl.constexpr, MINE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes words and heads to the inbox of the rank that is `far` away."""
    WORDS: tl.constexpr = (HEAD_DIM + 3) // 4
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_D // 4)
    row = ((epoch & 1) * WORLD + rank).to(tl.int64) * arriving + first + g
    words = (words.to(tl.int64) + far).to(words.dtype)
    heads = (heads.to(tl.int64) + far).to(heads.dtype)
    # The base comes from an integer: see `attention.store_rows`.
    there = tl.multiple_of(words + row[:, None] * WORDS + w[None, :], (8, 16 if WORDS % 2 == 0 else 8))
    tl.store(there, packed, mask=(g < GROUP)[:, None] & (w < WORDS)[None, :])
    h = tl.arange(0, MINE)
    there = tl.multiple_of(heads + row[:, None] * HEADS_A_ROW + h[None, :], (8, 16))
    tl.store(there, tl.broadcast_to(head[:, None], [BLOCK_G, MINE]), mask=(g < GROUP)[:, None] & (h < MINE)[None, :])


@triton.jit(do_not_specialize=["rank"])
def compact_kernel(
    q, k, v, lengths, table, out, splits, words, heads, bases, control, epochs,
    rank, items, kv_heads, rows, arriving, shard_len, scale,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, SPLIT_CHUNK: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`splits` are float32 words [SPLITS, rows, head_dim], `words` [2, world, arriving, head_dim / 4], `heads` [2, world, arriving, 2 PARTS],
    `epochs` int32 [programs]. A merging program takes one of PARTS of the columns of its rows.
    """
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
            q, k, v, lengths, table, item, split, kv_heads, shard_len, scale,
            GROUP, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, TARGET,
        )  # fmt: skip
        if DIRECT:
            first = item * GROUP
            if SHARE > 0:
                first = place(first, rows, kv_heads * GROUP, SHARE)
            push_rows(
                o, lse, first, words, heads, away, epoch, rank, arriving,
                WORLD, SHARE > 0, 2 * PARTS, 2 * PARTS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
            )  # fmt: skip
        else:
            at = places(split.to(tl.int64) * rows, item, kv_heads, rows, GROUP, BLOCK_G, SHARE)
            store_words(o, lse, splits, at, epoch, tl.float32, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    if not DIRECT:
        for block in tl.range(program, rows // HEADS * PARTS, programs, num_stages=1):
            first, part = block // PARTS * HEADS, block % PARTS
            merged, merged_lse = merge_words(
                splits + part * PART, tl.cast(first, tl.int64), rows, epoch, rank, control, limit,
                False, tl.float32, SPLITS, SPLIT_CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
            )  # fmt: skip
            push_rows(
                merged, tl.max(merged_lse, 1), first, words + part * (PART // 4), heads + 2 * part, away, epoch, rank, arriving,
                WORLD, SHARE > 0, 2 * PARTS, 2, HEADS, HEAD_DIM, BLOCK_H, PART,
            )  # fmt: skip
    slot = ((epoch & 1) * WORLD).to(tl.int64) * arriving
    for block in tl.range(program, arriving // HEADS * PARTS, programs, num_stages=1):
        first, part = block // PARTS * HEADS, block % PARTS
        merged = merge_columns(
            words + part * (PART // 4), heads + 2 * part, slot + first, arriving, epoch, control, limit,
            2 * PARTS, WORLD, CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
        )  # fmt: skip
        store_rows(merged, out + part * PART, first + tl.arange(0, BLOCK_H), HEADS, HEAD_DIM, BLOCK_H, PART)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + program, epoch + 1)


class Compact(Operator[FlashDecode]):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config)
        rows, dim, splits, parts, warps = shapes.rows, problem.head_dim, config["splits"], config["parts"], config["num_warps"]
        world, arriving, part = problem.world_size, shapes.arriving, shapes.attend["BLOCK_D"] // parts
        # Zeros are words of call 0, which is none.
        self.splits = context.empty((splits, rows, dim), torch.int64).zero_()
        self.words = context.heap.zeros((2, world, arriving, ceil_div(dim, 4)), torch.int64)
        self.heads = context.heap.zeros((2, world, arriving, 2 * parts), torch.int64)
        room = config["per_processor"] * context.processors
        wanted = max(shapes.items * splits, rows // shapes.heads * parts)
        self.programs = 1 if context.interpreted else min(room, wanted)
        self.epochs = context.empty((self.programs,), torch.int32).fill_(1)
        early = context.hardware.launches_overlap
        self.options = {} if context.interpreted else {"launch_cooperative_grid": True, "launch_pdl": early}
        self.merge = {
            "SPLIT_CHUNK": chunk_of(splits, shapes.heads, part, warps),
            "CHUNK": chunk_of(world, shapes.heads, part // 4, warps),
            "PARTS": parts,
            "EARLY": early,
        }

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes = self.problem, self.context, self.shapes
        inputs, out = inputs_of(tensors)
        context.launch(
            compact_kernel,
            (self.programs,),
            *inputs, out, self.splits, self.words, self.heads, context.heap.bases, self.control, self.epochs,
            context.rank, shapes.items, problem.kv_heads, shapes.rows, shapes.arriving, problem.shard_len, shapes.scale,
            WORLD=problem.world_size,
            HEADS=shapes.heads,
            BLOCK_H=power_of_two(shapes.heads),
            **self.merge,
            **shapes.attend,
            **self.options,
        )  # fmt: skip
