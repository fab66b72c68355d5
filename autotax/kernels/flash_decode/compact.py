"""compact: `resident` with LL words of four columns, a quarter of the bytes of float32 words on the links and between splits.

The phases, and the reasons why every wait ends, are those of `resident`. The arguments of `exchange` about tearing, stale words
and votes hold for heads and words alike: each has its tag, all are polled, and the vote and the merge use the same loaded values.

A word is 8 bytes, written by one store: four neighbouring columns of 15 bits each, and the tag of `exchange` in its last three
bits. A row also has a head: a float32 word of `exchange` with the row's scale and log-sum-exp. The scale is the power of two of
the largest finite magnitude among the columns.

A column has a sign, 5 bits of exponent and 9 of mantissa. They are bits of the float32 (column / scale + sign * 2^-29) * 2^126.
Its exponent field is 224 to 254, or 255 for infinity and NaN, so its first three bits are not sent. The term 2^-29 makes small
columns lose precision gradually, and zero arrives as zero. The error of a column is at most

    2^-10 * |column| + 2^-39 * (largest finite magnitude of the row) + 2^-149

for all finite columns that bf16 or fp16 can hold. So the relative error stays below 2^-9 for columns down to 2^-29 of the
largest; rounding to bf16 has 2^-8. Infinity arrives as infinity and NaN as NaN, and other columns are not affected.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context, all_resident, gdc_wait, threads_of
from autotax.kernels.flash_decode.attention import attend, place, places, store_rows, work_of
from autotax.kernels.flash_decode.exchange import TAG, absent, age, column_of, distances, lse_of, tag_of
from autotax.kernels.flash_decode.shapes import MOST_WORDS, DecodeKernel, Shapes
from autotax.kernels.primitives import ERROR, LIMIT, load_whole, note_missing, store_whole
from autotax.operators.flash_decode import FlashDecode

SIGN, EXPONENT = tl.constexpr(-0x80000000), tl.constexpr(0x7F800000)
MAGNITUDE, NAN, ONE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FC00000), tl.constexpr(0x3F800000)
LEAST = tl.constexpr(16 << 23)
"""The bits of 2^-111, the smallest scale: with a smaller one, infinity times a small weight and the scale would be 0 * inf."""
OFFSET, SENT_OFFSET = tl.constexpr((127 - 29) << 23), tl.constexpr((127 + 97) << 23)
"""The bits of 2^-29, and of 2^-29 * 2^126."""
HALF = tl.constexpr(1 << 13)
"""Half a unit in the last place of a column as it is sent."""


@triton.jit
def scale_of(o):
    """float32 [BLOCK_G]: the scale of each row of o [BLOCK_G, BLOCK_D]; 1 where no column is finite and not zero."""
    size = o.to(tl.int32, bitcast=True) & MAGNITUDE
    largest = tl.max(tl.where(size < EXPONENT, size, 0), 1)
    return tl.where(largest == 0, ONE, tl.maximum(largest & EXPONENT, LEAST)).to(tl.float32, bitcast=True)


@triton.jit
def pack_heads(scale, lse, epoch):
    """Packs scales and log-sum-exps of rows into their heads [BLOCK_G]."""
    low = scale.to(tl.int32, bitcast=True) | (epoch & TAG)
    return (lse.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def pack_columns(o, scale, epoch, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Packs o [BLOCK_G, BLOCK_D], whose rows have the scales `scale`, into words [BLOCK_G, BLOCK_D / 4]."""
    # Multiplies by 2 / scale and then by 2^125, because their product may overflow float32. The exponent field of 2 / scale is
    # 255 minus that of the scale.
    factor = (scale.to(tl.int32, bitcast=True) ^ EXPONENT).to(tl.float32, bitcast=True)
    offset = ((o.to(tl.int32, bitcast=True) & SIGN) | SENT_OFFSET).to(tl.float32, bitcast=True)
    sent = (o * factor[:, None] * 4.253529586511731e37 + offset).to(tl.int32, bitcast=True)
    # Replaces any NaN by one NaN: rounding must not carry into the sign bit.
    rounded = tl.minimum(sent & MAGNITUDE, NAN) + HALF
    bits = (((rounded >> 14) & 0x3FFF) | ((sent >> 17) & 0x4000)).to(tl.int64)
    even, odd = tl.split(tl.reshape(bits, [BLOCK_G, BLOCK_D // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (first << 4) | (second << 19) | (third << 34) | (fourth << 49) | (epoch & TAG).to(tl.int64)


@triton.jit
def store_packed(
    packed, head, words, heads, row, HEADS_A_ROW: tl.constexpr, MINE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes GROUP rows of words [BLOCK_G, BLOCK_D / 4] and heads [BLOCK_G] to rows `row` (int64) of `words` and `heads`.

    Each row gets MINE heads: two per part of the row. `packed` may hold a part, to whose start `words` and `heads` then point.
    """
    WORDS: tl.constexpr = (HEAD_DIM + 3) // 4
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_D // 4)
    h = tl.arange(0, MINE)
    # The base pointers may come from integers: see `attention.store_rows`.
    addresses = tl.multiple_of(words + row[:, None] * WORDS + w[None, :], (8, 16 if WORDS % 2 == 0 else 8))
    store_whole(addresses, packed, (g < GROUP)[:, None] & (w < WORDS)[None, :], TARGET)
    addresses = tl.multiple_of(heads + row[:, None] * HEADS_A_ROW + h[None, :], (8, 16))
    store_whole(addresses, tl.broadcast_to(head[:, None], [BLOCK_G, MINE]), (g < GROUP)[:, None] & (h < MINE)[None, :], TARGET)


@triton.jit
def number(words, COLUMN: tl.constexpr):
    """Column 0, 1, 2 or 3 of each word as float32, in units of its row's scale."""
    bits = ((words << (45 - 15 * COLUMN)) >> 35).to(tl.int32)  # the sign above bit 28, exponent and mantissa from 27 to 14
    sent = ((bits & -0x70004000) | SENT_OFFSET).to(tl.float32, bitcast=True)
    return sent * 1.1754943508222875e-38 - ((bits & SIGN) | OFFSET).to(tl.float32, bitcast=True)


@triton.jit
def poll_rows(words_at, heads_at, mask, safe, epoch, piece, rank, control, limit, FROM_RANKS: tl.constexpr, TARGET: tl.constexpr):
    """The words and heads at these addresses [BLOCK_G, CHUNK, BLOCK_W] when all have the call's tag, or after `limit` polls.

    `piece` [CHUNK] labels the note of a timeout, as in `exchange.poll`. Masked ones are zero.
    """
    nothing = tag_of(epoch, tl.float32)
    words = load_whole(words_at, mask, safe, nothing, TARGET)
    heads = load_whole(heads_at, mask, safe, nothing, TARGET)
    older = tl.where(age(heads, epoch, tl.float32) != 0, heads, words)
    missing = absent(older, epoch, tl.float32, TARGET)
    polls = 0
    while (missing != 0) & (polls < limit):
        words = load_whole(words_at, mask, safe, nothing, TARGET)
        heads = load_whole(heads_at, mask, safe, nothing, TARGET)
        older = tl.where(age(heads, epoch, tl.float32) != 0, heads, words)
        missing = absent(older, epoch, tl.float32, TARGET)
        polls += 1
        if polls % 1024 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                polls = limit
    if missing != 0:
        late = age(older, epoch, tl.float32)
        label = piece[None, :, None]
        first = tl.min(tl.where(late != 0, label, 2147483647))
        missing = epoch - tl.max(tl.where(label == first, late, 0))
        note_missing(control, first if FROM_RANKS else rank, first, epoch, missing, TARGET)
    return words, heads


@triton.jit
def merge_columns(
    words_in, heads_in, first, rows, epoch, rank, control, limit,
    FROM_RANKS: tl.constexpr, HEADS_A_ROW: tl.constexpr, PIECES: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows first ... first + GROUP of PIECES partial results and merges them, CHUNK (a power of two) at a time.

    `words_in` are [PIECES, rows, HEAD_DIM / 4, rounded up], `heads_in` [PIECES, rows, HEADS_A_ROW]; `first` is int64. BLOCK_D may
    be a part of HEAD_DIM; then both point to the start of that part. Returns o [BLOCK_G, BLOCK_D] and lse [BLOCK_G].

    Pieces are the middle axis, because Triton distributes warps along the first. So a thread merges all pieces of its columns.
    """
    WORDS: tl.constexpr = (HEAD_DIM + 3) // 4
    BLOCK_W: tl.constexpr = BLOCK_D // 4
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_W)
    top = tl.full([BLOCK_G, BLOCK_W], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    a = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    b = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    c = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    d = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    for block in tl.range(0, PIECES, CHUNK, num_stages=1):
        piece = block + tl.arange(0, CHUNK)
        inside = (g < GROUP)[:, None, None] & (piece < PIECES)[None, :, None] & (w < WORDS)[None, None, :]
        row = first + piece.to(tl.int64)[None, :, None] * rows + g[:, None, None]
        # Loads one head per word, from two equal copies, so that Triton distributes both tiles to the threads in the same way.
        words, heads = poll_rows(
            words_in + row * WORDS + w[None, None, :], heads_in + row * HEADS_A_ROW + (w % 2)[None, None, :], inside, words_in,
            epoch, piece, rank, control, limit, FROM_RANKS, TARGET,
        )  # fmt: skip
        lse = tl.where(inside, lse_of(heads, tl.float32), float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - base[:, None, :])
        scaled = weights * column_of(heads, False, tl.float32)
        shrink = tl.exp2(top - base)
        # One reduction sums both: where warps hold different pieces, each reduction costs three barriers.
        even = tl.join(scaled * number(words, 0), scaled * number(words, 2))
        odd = tl.join(scaled * number(words, 1), scaled * number(words, 3))
        evens, odds = tl.split(tl.sum(tl.join(even, odd), 1))
        sum_a, sum_c = tl.split(evens)
        sum_b, sum_d = tl.split(odds)
        a = a * shrink + sum_a
        b = b * shrink + sum_b
        c = c * shrink + sum_c
        d = d * shrink + sum_d
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    columns = tl.join(tl.join(a / divisor, c / divisor), tl.join(b / divisor, d / divisor))
    return tl.reshape(columns, [BLOCK_G, BLOCK_D]), tl.max(tl.where(some, top + tl.log2(divisor), float("-inf")), 1)


@triton.jit
def push_rows(
    o, lse, first, words, heads, away, epoch, rank, arriving,
    WORLD: tl.constexpr, SCATTER: tl.constexpr, HEADS_A_ROW: tl.constexpr, MINE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP of o [BLOCK_G, BLOCK_D] and lse [BLOCK_G] to the inboxes of all ranks, its own last.

    With SCATTER it writes only to the rank that owns the rows. MINE: see `store_packed`.
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
    """A merging program takes one of PARTS column ranges. `split_words` are [SPLITS, rows, head_dim / 4], `split_heads` [SPLITS,
    rows, 2 PARTS]; `words` and `heads` are alike for rows [2, world, arriving]; `epochs` is int32 [programs].
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
        self.splits = [context.empty((splits, rows, columns), torch.int64).zero_() for columns in (ceil_div(dim, 4), 2 * parts)]
        self.inbox = [context.heap.zeros((2, world, arriving, columns), torch.int64) for columns in (ceil_div(dim, 4), 2 * parts)]
        room = config["per_processor"] * context.processors
        useful = max(shapes.items * splits, rows // shapes.heads * parts)
        self.programs = 1 if context.interpreted else min(room, useful)
        self.epochs = context.empty((self.programs,), torch.int32).fill_(1)
        early = context.hardware.launches_overlap
        self.options = all_resident(context)
        self.merge = {
            "SPLIT_CHUNK": _chunk_of(splits, shapes.heads, part // 4, threads),
            "CHUNK": _chunk_of(world, shapes.heads, part // 4, threads), "PARTS": parts, "EARLY": early,
        }  # fmt: skip

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes = self.problem, self.context, self.shapes
        inputs, out = self.inputs_of(tensors)
        context.launch(
            compact_kernel, (self.programs,),
            *inputs, out, *self.splits, *self.inbox, context.heap.bases, self.control, self.epochs,
            context.rank, shapes.items, shapes.kv_heads, shapes.rows, shapes.arriving, problem.shard_len, shapes.scale,
            WORLD=problem.world_size, HEADS=shapes.heads, BLOCK_H=power_of_two(shapes.heads), **self.merge, **shapes.attend,
            **self.options,
        )  # fmt: skip


def _chunk_of(pieces: int, heads: int, width: int, threads: int) -> int:
    """Like `shapes.chunk_of`, for two tiles that are polled together."""
    words = power_of_two(heads) * width
    return max(1, ceil_div(threads, words), min(power_of_two(pieces), MOST_WORDS // 2 * threads // words))
