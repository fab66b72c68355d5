"""The order of blocks of queries, and the attention of one to spans of keys by an online softmax.

K and V are row-major [tokens, kv_heads * head_dim]; a span is some tokens of one KV head. The state of a block is (acc, top, total):
the sum of exp2(score - top) * V [BLOCK_M, HEAD_DIM], the greatest score and the sum of exp2(score - top) [BLOCK_M], all float32.
Scores are in units of log2(e), so that exp2 serves.
"""

import triton
import triton.language as tl

from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.products import load_tile
from autotax.kernels.primitives import arithmetic, dot

chiplet = arithmetic(tiling.chiplet)

ALIGNED = tl.constexpr(8)
"""Heads have multiples of this many elements."""


@triton.jit
def block_of(item, heads, blocks, BLOCK_FIRST: tl.constexpr, DIES: tl.constexpr):
    """The head and the block of queries of an item: all blocks of a head, then the next head; or with BLOCK_FIRST one block of
    every head, then the next block. The last block of a head comes first.

    The hardware deals programs to dies in turn. The order gives each die neighbouring blocks, or with BLOCK_FIRST neighbouring
    heads.
    """
    if BLOCK_FIRST:
        head = chiplet(item % heads, heads, DIES)
        place = item // heads
    else:
        at = chiplet(item, heads * blocks, DIES)
        head = at // blocks
        place = at % blocks
    return head, blocks - 1 - place


@triton.jit
def tokens_sent(source, reader, tokens, CAUSAL: tl.constexpr, CHUNKS: tl.constexpr):
    """How many of its `tokens` tokens of a sequence a rank sends to a reader, the first ones: see `GatherAttention.parts`."""
    of_higher = tokens if CHUNKS == 2 else 0
    return tl.where(source < reader, tokens // CHUNKS, of_higher) if CAUSAL else tokens


@triton.jit
def attend_blocks(
    state, q, k, v, row_k, row_v, rows, col, width, first, end, seen, tokens, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys first ... end - 1, in blocks from `first` on. Token t of the span is row `row_k` + t of K, `row_v` + t of V.

    MASKED: row i sees the tokens up to seen[i], and tokens from `tokens` on do not exist: their V may hold anything. Else every
    row sees all keys, which are whole blocks. `rows` and `width` are the rows and columns of K and V.
    """
    acc, top, total = state
    for at in tl.range(first, end, BLOCK_N):
        keys = load_tile(k, row_k + at, col, rows, width, width, BLOCK_N, HEAD_DIM, TMA, ALIGNED)
        scores = dot(q, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TARGET)
        if MASKED:
            token = at + tl.arange(0, BLOCK_N)
            scores = tl.where(token[None, :] <= seen[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        shares = tl.exp2(scores * scale - higher[:, None])
        fading = tl.exp2(top - higher)
        total = total * fading + tl.sum(shares, 1)
        values = load_tile(v, row_v + at, col, rows, width, width, BLOCK_N, HEAD_DIM, TMA, ALIGNED)
        if MASKED:
            values = tl.where((at + tl.arange(0, BLOCK_N) < tokens)[:, None], values, 0.0)
        acc = dot(shares, values, acc * fading[:, None], TARGET)
        top = higher
    return acc, top, total


@triton.jit
def attend_span(
    state, q, k, v, row_k, row_v, rows, col, width, first, end, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys first ... end - 1, which every row sees. EVEN: both bounds are multiples of BLOCK_N; else `first` is."""
    whole = end // BLOCK_N * BLOCK_N
    state = attend_blocks(
        state, q, k, v, row_k, row_v, rows, col, width, first, whole, first, end, scale,
        HEAD_DIM, BLOCK_M, BLOCK_N, False, TMA, TARGET,
    )  # fmt: skip
    if not EVEN:
        seen = tl.full([BLOCK_M], end - 1, tl.int32)
        state = attend_blocks(
            state, q, k, v, row_k, row_v, rows, col, width, whole, end, seen, end, scale,
            HEAD_DIM, BLOCK_M, BLOCK_N, True, TMA, TARGET,
        )  # fmt: skip
    return state
