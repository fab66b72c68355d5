"""Partial attention over a piece of the KV cache, and the merge of partial results: every Flash Decode variant uses them.

A partial result of some rows (query heads) is (o, lse): the softmax-weighted mean of V over the piece, and the base-2 logarithm
of the sum of exp2(score) over it, both float32. An empty piece is (0, -inf). Merging weighs each o by exp2(lse - max lse). This
is the online softmax of Flash Attention, split along the sequence (Flash-Decoding).

Layouts: row numbers are batch * q_heads + head, so the query heads of one KV head are neighbours. Partial results are o [pieces,
rows, head_dim] and lse [pieces, rows]. With output `head_scatter` rows are ordered by the rank that owns them (see `place`), so
that the data for a rank are one block.
"""

import triton
import triton.language as tl

from autotax.kernels import tiling
from autotax.kernels.flash_decode.cores import attend_by_block, attend_by_head, attend_by_warp
from autotax.kernels.primitives import arithmetic

chiplet = arithmetic(tiling.chiplet)
place = arithmetic(tiling.place)


@triton.jit
def attend(
    q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The partial result of KV head `item` (batch * kv_heads + head) over its split-th part: o [BLOCK_G, BLOCK_D], lse [BLOCK_G].

    `scale` is the softmax scale times log2(e). Rows past GROUP and columns past HEAD_DIM are padding. With PAGE tokens per page,
    `table` holds the page numbers of each sequence; only entries of existing tokens are loaded. Without pages it is None. WARPS >
    0: each warp handles its own tokens of a block. WARPS = 0: all warps share each block. WARPS < 0: each of -WARPS warps handles
    one KV head; then an `item` is -WARPS KV heads, GROUP counts the rows of all, and `kv_heads` are the items of a sequence.

    Rows are QUERIES query tokens of each of GROUP / QUERIES heads; `lengths` is [batch, QUERIES]. Three arguments may be None.
    `starts` has the shape of `lengths`: the first token that a query token sees. `scales` [2, kv_heads] belong to K and V.
    `sinks` [query heads] are logits that the first split counts.
    """
    if WARPS < 0:
        o, lse = attend_by_head(
            q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
            GROUP, QUERIES, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, -WARPS, TARGET,
        )  # fmt: skip
    elif WARPS > 0:
        o, lse = attend_by_warp(
            q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
            GROUP, QUERIES, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, WARPS, TARGET,
        )  # fmt: skip
    else:
        o, lse = attend_by_block(
            q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
            GROUP, QUERIES, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, TARGET,
        )  # fmt: skip
    return o, lse


@triton.jit
def store_rows(o, out, at, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes GROUP rows to rows `at` [BLOCK_G] of out [rows, head_dim], converted to its type."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    inside = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    size: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    # The base pointer may come from an integer, whose alignment Triton does not know. Without this hint the stores would be
    # narrow.
    width: tl.constexpr = 16 if (HEAD_DIM * size) % 16 == 0 else size
    addresses = tl.multiple_of(out + at[:, None] * HEAD_DIM + d[None, :], (size, width))
    tl.store(addresses, o.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_partial(
    o, lse, o_out, lse_out, at, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Writes GROUP rows of a partial result to rows `at` [BLOCK_G] of o_out [rows, head_dim] and lse_out [rows]."""
    store_rows(o, o_out, at, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    tl.store(lse_out + at, lse, mask=tl.arange(0, BLOCK_G) < GROUP)


@triton.jit
def places(before, item, kv_heads, rows, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, SHARE: tl.constexpr):
    """Row numbers [BLOCK_G] of KV head `item`, behind `before` rows. SHARE: query heads that a rank owns, 0 where all get all."""
    g = tl.arange(0, BLOCK_G)
    return before + place(item * GROUP + g, rows, kv_heads * GROUP, SHARE) if SHARE > 0 else before + item * GROUP + g


@triton.jit
def merge(
    o, lse, first, o_stride, lse_stride,
    PIECES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges PIECES partial results of rows first ... first + GROUP; strides are elements between pieces.

    The log-sum-exps are loaded first, so that the loads of all pieces are independent of each other. On NVIDIA the `.cg` loads
    bypass the L1, because another processor or rank may have written the data during this kernel. On AMD `.cg` is only a hint;
    there the acquire of a flag or count has already invalidated stale lines.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    UNROLL: tl.constexpr = 8 if PIECES % 8 == 0 else (PIECES if PIECES < 8 else 1)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for block in range(0, PIECES, UNROLL):
        for i in tl.static_range(UNROLL):
            at = lse + (block + i) * lse_stride + first + g
            top = tl.maximum(top, tl.load(at, mask=g < GROUP, other=float("-inf"), cache_modifier=".cg"))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    inside = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    for block in range(0, PIECES, UNROLL):
        for i in tl.static_range(UNROLL):
            at = lse + (block + i) * lse_stride + first + g
            weight = tl.exp2(tl.load(at, mask=g < GROUP, other=float("-inf"), cache_modifier=".cg") - base)
            rows = tl.cast(block + i, tl.int64) * o_stride + (first + g)[:, None] * HEAD_DIM + d[None, :]
            acc += weight[:, None] * tl.load(o + rows, mask=inside, other=0.0, cache_modifier=".cg")
            total += weight
    some = total > 0.0
    return acc / tl.where(some, total, 1.0)[:, None], tl.where(some, base + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def split_kernel(
    q, k, v, lengths, table, starts, scales, sinks, o, lse, kv_heads, rows, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, SHARE: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program per (KV head, split): writes its partial result to o [SPLITS, rows, head_dim], lse [SPLITS, rows]."""
    items = tl.num_programs(0) // SPLITS
    item, split = work_of(tl.program_id(0), items, SPLITS, SPLIT_FIRST, CHIPLETS)
    out, out_lse = attend(
        q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
        GROUP, QUERIES, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, WARPS, TARGET,
    )  # fmt: skip
    at = places(0, item, kv_heads, rows, GROUP, BLOCK_G, SHARE)
    store_partial(out, out_lse, o + split.to(tl.int64) * rows * HEAD_DIM, lse + split * rows, at, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit
def work_of(program, items, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr):
    """The (item, split) of a program: all splits of an item and then the next item, or with SPLIT_FIRST one split of all.

    The hardware deals programs to dies in turn. The order gives a die neighbouring splits, or with SPLIT_FIRST items.
    """
    if SPLIT_FIRST:
        item = chiplet(program % items, items, CHIPLETS)
        split = program // items
    else:
        place = chiplet(program, items * SPLITS, CHIPLETS)
        item = place // SPLITS
        split = place % SPLITS
    return item, split
