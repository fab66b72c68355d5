"""Attention over a piece of the KV cache in which all warps of a program share each block of tokens."""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.pages import page_of, piece
from autotax.kernels.primitives import dot


@triton.jit
def attend_by_block(
    q, k, v, lengths, table, item, split, kv_heads, shard_len, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PAGE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The partial result of KV head `item` (batch * kv_heads + head) over its split-th part: o [BLOCK_G, BLOCK_D], lse [BLOCK_G].

    `scale` is the softmax scale times log2(e). Rows past GROUP and columns past HEAD_DIM are padding. With PAGE tokens a page, `table`
    holds the page numbers of each sequence, of which only those of tokens that are there are loaded; else it is not used.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    start, end = piece(lengths, item // kv_heads, split, SPLITS, BLOCK_S)

    rows = item * GROUP + g
    query = tl.load(q + rows[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    if PAGE == 0:
        cache = item.to(tl.int64) * shard_len * HEAD_DIM
    else:
        cache = (item % kv_heads).to(tl.int64) * HEAD_DIM
        table += (item // kv_heads) * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # One total for each column of a block: summing them in every step would be two more barriers in each.
    totals = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_S):
        token = at + s
        if PAGE == 0:
            offsets = cache + token.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        else:
            slot = page.to(tl.int64) * PAGE + token % PAGE
            offsets = cache + slot[:, None] * kv_heads * HEAD_DIM + d[None, :]
            # For the next step: if keys had to wait for a load of the same step, the pipeline would be half as deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        inside = (token < end)[:, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, :]
        keys = tl.load(k + offsets, mask=inside, other=0.0)
        scores = dot(query, keys.T, tl.zeros([BLOCK_G, BLOCK_S], tl.float32), TARGET) * scale
        scores = tl.where((token < end)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        values = tl.load(v + offsets, mask=inside, other=0.0)
        acc = dot(weights, values, acc * shrink[:, None], TARGET)
        totals = totals * shrink[:, None] + weights
        top = new_top
    total = tl.sum(totals, 1)
    some = total > 0.0
    o = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    return o, lse
