"""Which tokens a split attends to, and the pages of a cache they lie in: shared by both attention cores."""

import triton
import triton.language as tl


@triton.jit
def piece(lengths, sequence, split, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The first token of a split and the one behind its last: whole blocks, but for the end of the sequence."""
    length = tl.load(lengths + sequence)
    per = tl.cdiv(tl.cdiv(length, BLOCK_S), SPLITS) * BLOCK_S
    start = split * per
    return start, tl.minimum(start + per, length)


@triton.jit
def page_of(table, at, s, end, PAGE: tl.constexpr, BLOCK_S: tl.constexpr):
    """The page numbers of tokens at + s, of the shape of s, or one if a block, which begins at a multiple of its size, lies in a page.

    Those at `end` and beyond are not loaded.
    """
    token = at if BLOCK_S <= PAGE else at + s
    return tl.load(table + token // PAGE, mask=token < end, other=0)
