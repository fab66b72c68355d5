"""Attention over a piece of the KV cache in which each warp of a program handles its own tokens of every block.

Warps wait for each other only at the copies of a block. A warp computes the maximum, the weights and the product with V for its
own 16 or more tokens. The results of the warps are merged once, at the end. Query heads are the columns of the matrix products;
the rows are tokens, then head_dim. So few heads are padded to eight columns instead of sixteen rows.

Triton assigns one product to each warp if the products form a batch of as many as there are warps.
"""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.cache import (
    LIFT,
    in_fp16,
    inside_of,
    load_cached,
    load_in_halves,
    of_queries,
    page_of,
    piece,
    sink_of,
)
from autotax.kernels.primitives import dot


@triton.jit
def attend_by_warp(
    q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The core of `attention.attend`; see there for the arguments."""
    PART: tl.constexpr = BLOCK_S // WARPS
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    start, end, first_seen = piece(lengths, starts, item // kv_heads, split, QUERIES, SPLITS, BLOCK_S)

    rows = item * GROUP + g
    query = tl.load(q + rows[None, :] * HEAD_DIM + d[:, None], mask=(g < GROUP)[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8 and query.dtype != tl.float32
    if HALF:
        query, power = in_fp16(query, 0)
    query = tl.broadcast_to(query[None, :, :], [WARPS, BLOCK_D, BLOCK_G])
    if PAGE == 0:
        cache = item.to(tl.int64) * shard_len * HEAD_DIM
    else:
        cache = (item % kv_heads).to(tl.int64) * HEAD_DIM
        table += (item // kv_heads) * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    top = tl.full([WARPS, BLOCK_G], float("-inf"), tl.float32)
    totals = tl.zeros([WARPS, PART, BLOCK_G], tl.float32)
    if sinks is not None:  # a sink acts as a first token of the first warp, whose value is zero
        sink = sink_of(sinks, item % kv_heads, split, g, GROUP, QUERIES)
        top = tl.where((tl.arange(0, WARPS) == 0)[:, None], sink[None, :], float("-inf"))
        totals = tl.where((tl.arange(0, PART) == 0)[None, :, None] & (top > float("-inf"))[:, None, :], 2.0**LIFT if HALF else 1.0, 0.0)
    if scales is not None:
        scale *= tl.load(scales + item % kv_heads)
    if HALF:
        scale = (scale * power)[None, None, :]
    if QUERIES > 1:
        ends = of_queries(lengths, item // kv_heads, g, GROUP, QUERIES)
        if starts is not None:
            firsts = of_queries(starts, item // kv_heads, g, GROUP, QUERIES)
    PAIRS: tl.constexpr = HALF and TARGET != "hip" and HEAD_DIM % 2 == 0
    if PAIRS:
        even = tl.zeros([WARPS, BLOCK_D // 2, BLOCK_G], tl.float32)
        odd = tl.zeros([WARPS, BLOCK_D // 2, BLOCK_G], tl.float32)
    else:
        acc = tl.zeros([WARPS, BLOCK_D, BLOCK_G], tl.float32)
    for at in range(start, end, BLOCK_S):
        token = at + s
        if PAGE == 0:
            first = cache + token.to(tl.int64) * HEAD_DIM
        else:
            slot = page.to(tl.int64) * PAGE + token % PAGE
            first = cache + slot * kv_heads * HEAD_DIM
            # Loads the page number of the next step: if keys waited for a load of the same step, the pipeline would be half as
            # deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        there = inside_of(token, first_seen, end, starts)
        inside, inside_across = there[:, :, None], there[:, None, :]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, None, :]
            inside_across = inside_across & (d < HEAD_DIM)[None, :, None]
        keys = load_cached(k, first[:, :, None] + d[None, None, :], inside, query.dtype, TARGET)
        scores = dot(keys, query, tl.zeros([WARPS, PART, BLOCK_G], tl.float32), TARGET) * scale
        seen = there[:, :, None]
        if QUERIES > 1:
            seen = seen & (token[:, :, None] < ends[None, None, :])
            if starts is not None:
                seen = seen & (token[:, :, None] >= firsts[None, None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if HALF:
            base -= LIFT
        weights = tl.exp2(scores - base[:, None, :])
        shrink = tl.exp2(top - base - LIFT) if HALF else tl.exp2(top - base)
        if PAIRS:
            evens, odds = load_in_halves(v, first, there, HEAD_DIM, BLOCK_D, TARGET)
            rounded = weights if TARGET == "interpreter" else weights.to(tl.float16)
            even = dot(evens, rounded, even * shrink[:, None, :], TARGET)
            odd = dot(odds, rounded, odd * shrink[:, None, :], TARGET)
        else:
            # The addresses transpose the tile: Triton would not prefetch a tile that is transposed after its load.
            values = load_cached(v, first[:, None, :] + d[None, :, None], inside_across, query.dtype, TARGET)
            # The interpreter multiplies float32, and its conversion would truncate instead of round.
            rounded = weights if TARGET == "interpreter" else weights.to(values.dtype)
            acc = dot(values, rounded, acc * shrink[:, None, :], TARGET)
        totals = totals * shrink[:, None, :] + weights
        top = new_top
    most, total = tl.reduce((top, tl.sum(totals, 1)), 0, _merge_totals)
    some = total > 0.0
    base = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp2(top - base[None, :]) / tl.where(some, total, 1.0)[None, :]
    if PAIRS:
        even = sum_over_warps(even * share[:, None, :], WARPS, BLOCK_D // 2, BLOCK_G)
        odd = sum_over_warps(odd * share[:, None, :], WARPS, BLOCK_D // 2, BLOCK_G)
        o = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [BLOCK_D, BLOCK_G])
    else:
        o = sum_over_warps(acc * share[:, None, :], WARPS, BLOCK_D, BLOCK_G)
    if scales is not None:
        o *= tl.load(scales + kv_heads + item % kv_heads)
    lse = tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if HALF:
        lse -= LIFT
    return tl.trans(o), lse


@triton.jit
def _merge_totals(top, total, other_top, other_total):
    """Combines two maxima and the sums relative to them."""
    most = tl.maximum(top, other_top)
    base = tl.where(most == float("-inf"), 0.0, most)
    return most, total * tl.exp2(top - base) + other_total * tl.exp2(other_top - base)


@triton.jit
def sum_over_warps(x, WARPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum of x [WARPS, ROWS, COLS] over its first axis, with one round trip through shared memory.

    `tl.split` needs both halves in one thread, so Triton moves whole tiles; a reduction over the axis would exchange single
    elements.
    """
    x = tl.permute(x, (1, 2, 0))
    if WARPS == 8:
        one, two = tl.split(tl.reshape(x, [ROWS, COLS, 4, 2]))
        x = one + two
    if WARPS >= 4:
        one, two = tl.split(tl.reshape(x, [ROWS, COLS, 2, 2]))
        x = one + two
    if WARPS >= 2:
        one, two = tl.split(x)
        x = one + two
    return tl.reshape(x, [ROWS, COLS])
