"""Attention over a piece of the KV cache in which all warps of a program share each block of tokens."""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.cache import LIFT, in_fp16, inside_of, load_cached, of_queries, page_of, piece, sink_of
from autotax.kernels.primitives import dot


@triton.jit
def attend_by_block(
    q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PAGE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The core of `attention.attend`; see there for the arguments."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    start, end, first = piece(lengths, starts, item // kv_heads, split, QUERIES, SPLITS, BLOCK_S)

    rows = item * GROUP + g
    query = tl.load(q + rows[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8 and query.dtype != tl.float32
    if HALF:
        query, power = in_fp16(query, 1)
    if PAGE == 0:
        cache = item.to(tl.int64) * shard_len * HEAD_DIM
    else:
        cache = (item % kv_heads).to(tl.int64) * HEAD_DIM
        table += (item // kv_heads) * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # One total per column of a block: summing over the columns in every step would cost two more barriers per step.
    totals = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    if sinks is not None:  # a sink acts as a first token whose value is zero
        top = sink_of(sinks, item % kv_heads, split, g, GROUP, QUERIES)
        totals = tl.where((s == 0)[None, :] & (top > float("-inf"))[:, None], 2.0**LIFT if HALF else 1.0, 0.0)
    if scales is not None:
        scale *= tl.load(scales + item % kv_heads)
    if HALF:
        scale = (scale * power)[:, None]
    if QUERIES > 1:
        ends = of_queries(lengths, item // kv_heads, g, GROUP, QUERIES)
        if starts is not None:
            firsts = of_queries(starts, item // kv_heads, g, GROUP, QUERIES)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_S):
        token = at + s
        if PAGE == 0:
            offsets = cache + token.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        else:
            slot = page.to(tl.int64) * PAGE + token % PAGE
            offsets = cache + slot[:, None] * kv_heads * HEAD_DIM + d[None, :]
            # Loads the page number of the next step: if keys waited for a load of the same step, the pipeline would be half as
            # deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        there = inside_of(token, first, end, starts)
        inside = there[:, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, :]
        keys = load_cached(k, offsets, inside, query.dtype, TARGET)
        scores = dot(query, keys.T, tl.zeros([BLOCK_G, BLOCK_S], tl.float32), TARGET) * scale
        seen = there[None, :]
        if QUERIES > 1:
            seen = seen & (token[None, :] < ends[:, None])
            if starts is not None:
                seen = seen & (token[None, :] >= firsts[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if HALF:
            base -= LIFT
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base - LIFT) if HALF else tl.exp2(top - base)
        values = load_cached(v, offsets, inside, query.dtype, TARGET)
        acc = dot(weights, values, acc * shrink[:, None], TARGET)
        totals = totals * shrink[:, None] + weights
        top = new_top
    total = tl.sum(totals, 1)
    some = total > 0.0
    o = acc / tl.where(some, total, 1.0)[:, None]
    if scales is not None:
        o *= tl.load(scales + kv_heads + item % kv_heads)
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if HALF:
        lse -= LIFT
    return o, lse
