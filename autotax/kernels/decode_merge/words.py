"""words and compact: one kernel. All programs push rows as LL words, then each merges some rows. No fences, no flags.

A word is 8 bytes: a float32 of O, its row's log-sum-exp, and a tag of three bits (see `flash_decode.exchange`). Each call writes
all words of its slot; a call of fewer rows sends empty ones. See docs/decode-merge.md for why waits end and no word is stale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context, gdc_wait, threads_of
from autotax.kernels.decode_merge.layout import AtOnce, load_partial, store_merged
from autotax.kernels.flash_decode.attention import place
from autotax.kernels.flash_decode.compact import _chunk_of, merge_columns, push_rows
from autotax.kernels.flash_decode.exchange import distances, merge_words, push_result
from autotax.kernels.flash_decode.shapes import chunk_of
from autotax.kernels.primitives import LIMIT
from autotax.operators.decode_merge import DecodeMerge


@triton.jit(do_not_specialize=["lse", "lens", "starts", "sequences", "rows", "lse_token", "lse_head", "rank", "taken"])
def words_kernel(
    o, lse, lens, starts, sequences, rows, heads, lse_token, lse_head, out, out_lse, inbox, bases, control, epochs, rank, taken, most_rows, arriving,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, SHARE: tl.constexpr, BASE_E: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`inbox` are words [2, world, arriving, head_dim], `epochs` int32 [programs]. A program takes one of PARTS column ranges."""
    PART: tl.constexpr = BLOCK_D // PARTS
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    limit = tl.load(control + LIMIT)
    away = distances(bases, rank, WORLD)
    for block in tl.range(program, most_rows // GROUP * PARTS, programs, num_stages=1):
        first, part = block // PARTS * GROUP, block % PARTS
        mine, sums = load_partial(
            o + part * PART, lse, lens, starts, sequences, first, rows, heads, lse_token, lse_head, BASE_E, GROUP, HEAD_DIM, BLOCK_G, PART
        )  # fmt: skip
        if SHARE > 0:
            first = place(first, most_rows, heads, SHARE)
        push_result(
            mine, sums, first, inbox + part * PART, None, None, bases, away, epoch, rank, arriving,
            WORLD, True, tl.float32, SHARE > 0, GROUP, HEAD_DIM, BLOCK_G, PART, TARGET,
        )  # fmt: skip
    slot = ((epoch & 1) * WORLD).to(tl.int64) * arriving
    for block in tl.range(program, taken // GROUP * PARTS, programs, num_stages=1):
        first, part = block // PARTS * GROUP, block % PARTS
        merged, sums = merge_words(
            inbox + part * PART, slot + first, arriving, epoch, rank, control, limit,
            True, tl.float32, WORLD, CHUNK, GROUP, HEAD_DIM, BLOCK_G, PART, TARGET,
        )  # fmt: skip
        # Each word carries the log-sum-exp of its row; columns past the last have no words.
        sums = tl.max(tl.where((tl.arange(0, PART) < HEAD_DIM)[None, :], sums, float("-inf")), 1)
        store_merged(merged, sums, out + part * PART, out_lse, first, part == 0, BASE_E, GROUP, HEAD_DIM, BLOCK_G, PART, TARGET)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + program, epoch + 1)


class Words(AtOnce):
    KERNEL = words_kernel

    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        width = max(16, power_of_two(problem.head_dim)) // config["parts"]
        threads = threads_of(context, config["num_warps"])
        super().__init__(problem, config, context, chunk_of(problem.world_size, config["rows"], width, threads))
        shape = 2, problem.world_size, self.layout.arriving, problem.head_dim
        self.memory: tuple[Tensor, ...] = (context.heap.zeros(shape, torch.int64),)


@triton.jit(do_not_specialize=["lse", "lens", "starts", "sequences", "rows", "lse_token", "lse_head", "rank", "taken"])
def compact_merge_kernel(
    o, lse, lens, starts, sequences, rows, heads, lse_token, lse_head, out, out_lse, words, tops, bases, control, epochs, rank, taken, most_rows, arriving,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, SHARE: tl.constexpr, BASE_E: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`words` are [2, world, arriving, head_dim / 4], `tops` their heads [2, world, arriving, 2 PARTS]; see `words_kernel`."""
    PART: tl.constexpr = BLOCK_D // PARTS
    ALL: tl.constexpr = 2 * PARTS
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    limit = tl.load(control + LIMIT)
    away = distances(bases, rank, WORLD)
    for block in tl.range(program, most_rows // GROUP * PARTS, programs, num_stages=1):
        first, part = block // PARTS * GROUP, block % PARTS
        mine, sums = load_partial(
            o + part * PART, lse, lens, starts, sequences, first, rows, heads, lse_token, lse_head, BASE_E, GROUP, HEAD_DIM, BLOCK_G, PART
        )  # fmt: skip
        if SHARE > 0:
            first = place(first, most_rows, heads, SHARE)
        push_rows(
            mine, sums, first, words + part * (PART // 4), tops + 2 * part, away, epoch, rank, arriving,
            WORLD, SHARE > 0, ALL, 2, GROUP, HEAD_DIM, BLOCK_G, PART, TARGET,
        )  # fmt: skip
    slot = ((epoch & 1) * WORLD).to(tl.int64) * arriving
    for block in tl.range(program, taken // GROUP * PARTS, programs, num_stages=1):
        first, part = block // PARTS * GROUP, block % PARTS
        merged, sums = merge_columns(
            words + part * (PART // 4), tops + 2 * part, slot + first, arriving, epoch, rank, control, limit,
            True, ALL, WORLD, CHUNK, GROUP, HEAD_DIM, BLOCK_G, PART, TARGET,
        )  # fmt: skip
        store_merged(merged, sums, out + part * PART, out_lse, first, part == 0, BASE_E, GROUP, HEAD_DIM, BLOCK_G, PART, TARGET)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + program, epoch + 1)


class Compact(AtOnce):
    """`Words` with words of four 15-bit floats (`flash_decode.compact`), so a column costs 16 bits on the links.

    Besides its words, each part of a row has a head, sent twice: a float32 word with the scale and the log-sum-exp. The error of
    a column is at most 2^-10 of it plus 2^-39 of the largest finite column of its part. Heads and words are polled together.
    """

    KERNEL = compact_merge_kernel

    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        parts, dim = config["parts"], problem.head_dim
        width = max(16, power_of_two(dim)) // parts // 4
        threads = threads_of(context, config["num_warps"])
        super().__init__(problem, config, context, _chunk_of(problem.world_size, config["rows"], width, threads))
        shape = 2, problem.world_size, self.layout.arriving
        self.memory: tuple[Tensor, ...] = tuple(
            context.heap.zeros((*shape, columns), torch.int64) for columns in (ceil_div(dim, 4), 2 * parts)
        )
