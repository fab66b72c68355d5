"""Attention over a piece of the KV cache in which each warp of a program handles one KV head.

A page holds all KV heads of a token, then those of the next token. So the heads of a program are contiguous for each token. A
block lies in one page, so its addresses need one page number. A program of a single head would read a separate piece of memory
for each token.

As in `by_warp`, warps wait for each other only at the copies of a block, and query heads are the columns of the matrix products.
No merge over warps follows.
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
def attend_by_head(
    q, k, v, lengths, table, starts, scales, sinks, item, split, blocks, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The core of `attention.attend`. An item is HEADS KV heads, a sequence has `blocks` items, and GROUP counts the rows of an
    item.

    The number of rows of a KV head must be a power of two, and a block of tokens at most a page.
    """
    OWN: tl.constexpr = GROUP // HEADS
    COLUMNS: tl.constexpr = max(OWN, 16 if TARGET == "hip" else 8)
    sequence, head = item // blocks, item % blocks * HEADS
    kv_heads = blocks * HEADS
    h = tl.arange(0, HEADS)
    g = tl.arange(0, COLUMNS)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    start, end, first_seen = piece(lengths, starts, sequence, split, QUERIES, SPLITS, BLOCK_S)

    rows = item * GROUP + h[:, None] * OWN + g[None, :]
    real = (g < OWN)[None, None, :] & (d < HEAD_DIM)[None, :, None]
    query = tl.load(q + rows[:, None, :] * HEAD_DIM + d[None, :, None], mask=real, other=0.0)
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8 and query.dtype != tl.float32
    PAIRS: tl.constexpr = HALF and TARGET != "hip" and HEAD_DIM % 2 == 0
    if HALF:
        query, power = in_fp16(query, 1)
    top = tl.full([HEADS, COLUMNS], float("-inf"), tl.float32)
    totals = tl.zeros([HEADS, BLOCK_S, COLUMNS], tl.float32)
    if sinks is not None:  # a sink acts as a first token whose value is zero
        top = sink_of(sinks, head + h[:, None], split, g[None, :], OWN, QUERIES)
        totals = tl.where((s == 0)[None, :, None] & (top > float("-inf"))[:, None, :], 2.0**LIFT if HALF else 1.0, 0.0)
    factor = tl.full([HEADS, 1], 1.0, tl.float32) * scale
    if scales is not None:
        factor *= tl.load(scales + head + h)[:, None]
    if HALF:
        factor = factor * power
    if QUERIES > 1:
        ends = of_queries(lengths, sequence, g, OWN, QUERIES)
        if starts is not None:
            firsts = of_queries(starts, sequence, g, OWN, QUERIES)
    if PAGE == 0:
        cache = item.to(tl.int64) * HEADS * shard_len * HEAD_DIM
        first = s[None, :] * HEAD_DIM + h[:, None].to(tl.int64) * shard_len * HEAD_DIM
    else:
        stride = kv_heads * HEAD_DIM
        first = s[None, :] * stride + h[:, None] * HEAD_DIM
        table += sequence * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    if PAIRS:
        even = tl.zeros([HEADS, BLOCK_D // 2, COLUMNS], tl.float32)
        odd = tl.zeros([HEADS, BLOCK_D // 2, COLUMNS], tl.float32)
    else:
        acc = tl.zeros([HEADS, BLOCK_D, COLUMNS], tl.float32)
    for at in range(start, end, BLOCK_S):
        if PAGE == 0:
            block = cache + tl.cast(at, tl.int64) * HEAD_DIM
        else:
            block = (page.to(tl.int64) * PAGE + at % PAGE) * stride + head * HEAD_DIM
            # Loads the page number of the next step: if keys waited for a load of the same step, the pipeline would be half as
            # deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        token = at + s
        there = inside_of(token, first_seen, end, starts)[None, :] & (h >= 0)[:, None]
        inside = there[:, :, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, None, :]
        keys = load_cached(k + block, first[:, :, None] + d[None, None, :], inside, query.dtype, TARGET)
        scores = dot(keys, query, tl.zeros([HEADS, BLOCK_S, COLUMNS], tl.float32), TARGET) * factor[:, None, :]
        seen = there[:, :, None]
        if QUERIES > 1:
            seen = seen & (token[None, :, None] < ends[None, None, :])
            if starts is not None:
                seen = seen & (token[None, :, None] >= firsts[None, None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if HALF:
            base -= LIFT
        weights = tl.exp2(scores - base[:, None, :])
        shrink = (tl.exp2(top - base - LIFT) if HALF else tl.exp2(top - base))[:, None, :]
        if PAIRS:
            evens, odds = load_in_halves(v + block, first, there, HEAD_DIM, BLOCK_D, TARGET)
            rounded = weights if TARGET == "interpreter" else weights.to(tl.float16)
            even = dot(evens, rounded, even * shrink, TARGET)
            odd = dot(odds, rounded, odd * shrink, TARGET)
        else:
            # The addresses transpose the tile: Triton would not prefetch a tile that is transposed after its load.
            inside_across = there[:, None, :]
            if HEAD_DIM != BLOCK_D:
                inside_across = inside_across & (d < HEAD_DIM)[None, :, None]
            values = load_cached(v + block, first[:, None, :] + d[None, :, None], inside_across, query.dtype, TARGET)
            # The interpreter multiplies float32, and its conversion would truncate instead of round.
            rounded = weights if TARGET == "interpreter" else weights.to(values.dtype)
            acc = dot(values, rounded, acc * shrink, TARGET)
        totals = totals * shrink + weights
        top = new_top
    if PAIRS:
        acc = tl.reshape(tl.permute(tl.join(even, odd), (0, 1, 3, 2)), [HEADS, BLOCK_D, COLUMNS])
    total = tl.sum(totals, 1)
    some = total > 0.0
    o = acc / tl.where(some, total, 1.0)[:, None, :]
    if scales is not None:
        o *= tl.load(scales + kv_heads + head + h)[:, None, None]
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if HALF:
        lse -= LIFT
    if COLUMNS > OWN:  # keeps the first OWN columns; the others are padding
        o = tl.sum(tl.reshape(tl.where((g < OWN)[None, None, :], o, 0.0), [HEADS, BLOCK_D, COLUMNS // OWN, OWN]), 2)
        lse = tl.sum(tl.reshape(tl.where((g < OWN)[None, :], lse, 0.0), [HEADS, COLUMNS // OWN, OWN]), 1)
    return tl.reshape(tl.permute(o, (0, 2, 1)), [BLOCK_G, BLOCK_D]), tl.reshape(lse, [BLOCK_G])
