"""Loads and stores of the merge: rows of O and LSE, in the layouts of attention kernels.

A row is (query token, head). Inside the kernels log-sum-exps have base 2, and an empty row is (0, -inf). These are the
conventions of `kernels.flash_decode`, whose merge and exchange these variants use.
"""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.attention import store_rows


@triton.jit
def holds_nothing(lens, starts, sequences, token):
    """Whether the sequence of a query token has no tokens on this rank, or the token lies past the last sequence.

    `lens` int32 [sequences] counts the tokens of each sequence on this rank. `starts` int32 [sequences + 1] gives the first query
    token of each sequence; its last entry is the number of query tokens.
    """
    ended = 0
    for block in tl.range(0, sequences, 128, num_stages=1):
        at = block + tl.arange(0, 128)
        ended += tl.sum((tl.load(starts + 1 + at, mask=at < sequences, other=2147483647) <= token).to(tl.int32))
    length = tl.load(lens + tl.minimum(ended, sequences - 1))
    return (ended >= sequences) | (length == 0)


@triton.jit
def load_partial(
    o, lse, lens, starts, sequences, first, rows, heads, lse_token, lse_head,
    BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads rows first ... first + GROUP of this rank's O [tokens, heads, head_dim] and LSE as float32 o [BLOCK_G, BLOCK_D], lse
    [BLOCK_G].

    `lse_token` and `lse_head` are the strides of LSE. The result is (0, -inf) for rows whose LSE is not finite, whatever O holds
    there, and for rows from `rows` on. With `lens` it is (0, -inf) also for tokens for which `holds_nothing` is true. BLOCK_D may
    be a part of HEAD_DIM; then `o` points to the first column of that part.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    row = first + g
    there = (g < GROUP) & (row < rows)
    at = lse + (row // heads).to(tl.int64) * lse_token + (row % heads).to(tl.int64) * lse_head
    sums = tl.load(at, mask=there, other=float("-inf"))
    tile = tl.load(
        o + row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )
    if BASE_E:
        sums = sums * 1.4426950408889634
    some = (sums > float("-inf")) & (sums < float("inf"))
    if lens is not None:
        some = some & (holds_nothing(lens, starts, sequences, first // heads) == 0)
    return tl.where(some[:, None], tile.to(tl.float32), 0.0), tl.where(some, sums, float("-inf"))


@triton.jit
def store_merged(
    o, lse, out, out_lse, first, WITH_LSE,
    BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP of the merged O [rows, head_dim], and with WITH_LSE of the merged LSE [rows]."""
    g = tl.arange(0, BLOCK_G)
    if TARGET == "interpreter" and tl.bfloat16 == out.dtype.element_ty:
        # The interpreter's own conversion truncates, which has twice the error of rounding.
        bits = o.to(tl.int32, bitcast=True)
        o = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    store_rows(o, out, first + g, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    if BASE_E:
        lse = lse * 0.6931471805599453
    tl.store(out_lse + first + g, lse, mask=(g < GROUP) & WITH_LSE)
