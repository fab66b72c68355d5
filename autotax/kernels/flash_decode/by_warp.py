"""Attention over a piece of the KV cache in which each warp of a program has tokens of its own in every block.

No warp waits for another but for the copies of a block. A maximum, the weights and the product with V are those of 16 or more
tokens, within a warp. The results of the warps are merged once, at the end. Query heads are the columns of the products,
tokens and then head_dim their rows, so few heads pad to eight columns, not to sixteen rows.

Triton gives each warp a product of its own when the products are a batch of as many as there are warps.
"""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.pages import page_of, piece
from autotax.kernels.primitives import dot


@triton.jit
def attend_by_warp(
    q, k, v, lengths, table, item, split, kv_heads, shard_len, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """As `attention.attend` says."""
    PART: tl.constexpr = BLOCK_S // WARPS
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    start, end = piece(lengths, item // kv_heads, split, SPLITS, BLOCK_S)

    rows = item * GROUP + g
    query = tl.load(q + rows[None, :] * HEAD_DIM + d[:, None], mask=(g < GROUP)[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    query = tl.broadcast_to(query[None, :, :], [WARPS, BLOCK_D, BLOCK_G])
    if PAGE == 0:
        cache = item.to(tl.int64) * shard_len * HEAD_DIM
    else:
        cache = (item % kv_heads).to(tl.int64) * HEAD_DIM
        table += (item // kv_heads) * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    top = tl.full([WARPS, BLOCK_G], float("-inf"), tl.float32)
    totals = tl.zeros([WARPS, PART, BLOCK_G], tl.float32)
    acc = tl.zeros([WARPS, BLOCK_D, BLOCK_G], tl.float32)
    for at in range(start, end, BLOCK_S):
        token = at + s
        if PAGE == 0:
            first = cache + token.to(tl.int64) * HEAD_DIM
        else:
            slot = page.to(tl.int64) * PAGE + token % PAGE
            first = cache + slot * kv_heads * HEAD_DIM
            # For the next step: if keys had to wait for a load of the same step, the pipeline would be half as deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        inside, inside_across = (token < end)[:, :, None], (token < end)[:, None, :]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, None, :]
            inside_across = inside_across & (d < HEAD_DIM)[None, :, None]
        keys = tl.load(k + (first[:, :, None] + d[None, None, :]), mask=inside, other=0.0)
        scores = dot(keys, query, tl.zeros([WARPS, PART, BLOCK_G], tl.float32), TARGET) * scale
        scores = tl.where((token < end)[:, :, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None, :])
        shrink = tl.exp2(top - base)
        # Transposed by its addresses: a tile that is turned over after its load would not be copied ahead.
        values = tl.load(v + (first[:, None, :] + d[None, :, None]), mask=inside_across, other=0.0)
        # The interpreter would cut off what is rounded here, and multiplies float32.
        rounded = weights if TARGET == "interpreter" else weights.to(values.dtype)
        acc = dot(values, rounded, acc * shrink[:, None, :], TARGET)
        totals = totals * shrink[:, None, :] + weights
        top = new_top
    most, total = tl.reduce((top, tl.sum(totals, 1)), 0, _merge_totals)
    some = total > 0.0
    base = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp2(top - base[None, :]) / tl.where(some, total, 1.0)[None, :]
    o = sum_over_warps(acc * share[:, None, :], WARPS, BLOCK_D, BLOCK_G)
    lse = tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    return tl.trans(o), lse


@triton.jit
def _merge_totals(top, total, other_top, other_total):
    """Of two maxima and the sums relative to them."""
    most = tl.maximum(top, other_top)
    base = tl.where(most == float("-inf"), 0.0, most)
    return most, total * tl.exp2(top - base) + other_total * tl.exp2(other_top - base)


@triton.jit
def sum_over_warps(x, WARPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum of x [WARPS, ROWS, COLS] over its first axis, by one trip through shared memory.

    A split asks for both halves in one thread; a reduction over the axis would pass every element on by itself.
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
