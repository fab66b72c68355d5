"""compact: `resident` with words of four 15-bit floats (`minifloat`), a quarter of the bytes of its float32 words on the links.

The phases, and the reasons why every wait ends, are those of `resident`. The splits of a rank exchange results in such words too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import attend, place, places, store_rows, work_of
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.flash_decode.minifloat import merge_columns, pack_columns, pack_heads, scale_of, store_packed
from autotax.kernels.flash_decode.shapes import MOST_WORDS, DecodeKernel, Shapes
from autotax.kernels.primitives import LIMIT
from autotax.kernels.residency import all_resident, gdc_wait, threads_of
from autotax.operators.flash_decode import FlashDecode


@triton.jit
def push_rows(
    o, lse, first, words, heads, away, epoch, rank, arriving,
    WORLD: tl.constexpr, SCATTER: tl.constexpr, HEADS_A_ROW: tl.constexpr, MINE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP of o [BLOCK_G, BLOCK_D] and lse [BLOCK_G] to the inboxes of all ranks, last to this
    rank's inbox. With SCATTER it writes only to the rank that owns the rows. MINE: see `store_packed`.
    """
    scale = scale_of(o)
    packed = pack_columns(o, scale, epoch, BLOCK_G, BLOCK_D)
    head = pack_heads(scale, lse, epoch)
    row = ((epoch & 1) * WORLD + rank).to(tl.int64) * arriving + first % arriving + tl.arange(0, BLOCK_G)
    if SCATTER:
        far = tl.cast(0, tl.int64)
        for hop in tl.static_range(WORLD):
            far += tl.where((rank + 1 + hop) % WORLD == first // arriving, away[hop], 0)
        to, to_heads = (words.to(tl.int64) + far).to(words.dtype), (heads.to(tl.int64) + far).to(heads.dtype)
        store_packed(packed, head, to, to_heads, row, HEADS_A_ROW, MINE, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
    else:
        for hop in tl.static_range(WORLD):
            to, to_heads = (words.to(tl.int64) + away[hop]).to(words.dtype), (heads.to(tl.int64) + away[hop]).to(heads.dtype)
            store_packed(packed, head, to, to_heads, row, HEADS_A_ROW, MINE, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)


@triton.jit(do_not_specialize=["rank"])
def compact_kernel(
    q, k, v, lengths, table, starts, scales, sinks, out, split_words, split_heads, words, heads, bases, control, epochs,
    rank, items, kv_heads, rows, arriving, shard_len, scale,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, SPLIT_CHUNK: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, SHARE: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`split_words` are [SPLITS, rows, head_dim / 4] and `split_heads` [SPLITS, rows, 2 PARTS], `words` and `heads` have the same
    layout per row of [2, world, arriving]; `epochs` is int32 [programs]. A merging program handles one of PARTS column ranges of
    its rows.
    """
    DIRECT: tl.constexpr = SPLITS == 1 and SHARE % GROUP == 0
    PART: tl.constexpr = BLOCK_D // PARTS
    ALL: tl.constexpr = 2 * PARTS
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
            push_rows(
                o, lse, first, words, heads, away, epoch, rank, arriving,
                WORLD, SHARE > 0, ALL, ALL, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
            )  # fmt: skip
        else:
            at = places(split.to(tl.int64) * rows, item, kv_heads, rows, GROUP, BLOCK_G, SHARE)
            row_scales = scale_of(o)
            packed, head = pack_columns(o, row_scales, epoch, BLOCK_G, BLOCK_D), pack_heads(row_scales, lse, epoch)
            store_packed(packed, head, split_words, split_heads, at, ALL, ALL, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
    if not DIRECT:
        for block in tl.range(program, rows // HEADS * PARTS, programs, num_stages=1):
            first, part = block // PARTS * HEADS, block % PARTS
            merged, merged_lse = merge_columns(
                split_words + part * (PART // 4), split_heads + 2 * part, tl.cast(first, tl.int64), rows, epoch, rank, control, limit,
                False, ALL, SPLITS, SPLIT_CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
            )  # fmt: skip
            push_rows(
                merged, merged_lse, first, words + part * (PART // 4), heads + 2 * part, away, epoch, rank, arriving,
                WORLD, SHARE > 0, ALL, 2, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
            )  # fmt: skip
    slot = ((epoch & 1) * WORLD).to(tl.int64) * arriving
    for block in tl.range(program, arriving // HEADS * PARTS, programs, num_stages=1):
        first, part = block // PARTS * HEADS, block % PARTS
        merged, _ = merge_columns(
            words + part * (PART // 4), heads + 2 * part, slot + first, arriving, epoch, rank, control, limit,
            True, ALL, WORLD, CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
        )  # fmt: skip
        store_rows(merged, out + part * PART, first + tl.arange(0, BLOCK_H), HEADS, HEAD_DIM, BLOCK_H, PART)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + program, epoch + 1)


class Compact(DecodeKernel):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config, context.target)
        rows, dim, splits, parts = shapes.rows, problem.head_dim, config["splits"], config["parts"]
        threads = threads_of(context, config["num_warps"])
        world, arriving, part = problem.world_size, shapes.arriving, shapes.attend["BLOCK_D"] // parts
        # Zeros carry the tag of call 0. Calls start at 1, so they never match.
        self.splits = [context.empty((splits, rows, each), torch.int64).zero_() for each in (ceil_div(dim, 4), 2 * parts)]
        self.inbox = [context.heap.zeros((2, world, arriving, each), torch.int64) for each in (ceil_div(dim, 4), 2 * parts)]
        room = config["per_processor"] * context.processors
        wanted = max(shapes.items * splits, rows // shapes.heads * parts)
        self.programs = 1 if context.interpreted else min(room, wanted)
        self.epochs = context.empty((self.programs,), torch.int32).fill_(1)
        early = context.hardware.launches_overlap
        self.options = all_resident(context)
        self.merge = {
            "SPLIT_CHUNK": _chunk_of(splits, shapes.heads, part // 4, threads),
            "CHUNK": _chunk_of(world, shapes.heads, part // 4, threads),
            "PARTS": parts,
            "EARLY": early,
        }

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes = self.problem, self.context, self.shapes
        inputs, out = self.inputs_of(tensors)
        context.launch(
            compact_kernel,
            (self.programs,),
            *inputs, out, *self.splits, *self.inbox, context.heap.bases, self.control, self.epochs,
            context.rank, shapes.items, shapes.kv_heads, shapes.rows, shapes.arriving, problem.shard_len, shapes.scale,
            WORLD=problem.world_size,
            HEADS=shapes.heads,
            BLOCK_H=power_of_two(shapes.heads),
            **self.merge,
            **shapes.attend,
            **self.options,
        )  # fmt: skip


def _chunk_of(pieces: int, heads: int, width: int, threads: int) -> int:
    """Like `shapes.chunk_of`, for two tiles that are polled together."""
    words = power_of_two(heads) * width
    return max(1, ceil_div(threads, words), min(power_of_two(pieces), MOST_WORDS // 2 * threads // words))
