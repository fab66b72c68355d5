"""Which tokens a split attends to, and the pages of a cache they lie in: shared by both attention cores."""

import triton
import triton.language as tl


@triton.jit
def piece(lengths, starts, sequence, split, QUERIES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The first token of a split, the one behind its last, and the first one to be read: whole blocks, but for the end of the
    sequence. Of several query tokens the last one sees the end of the sequence, the first one its first token.
    """
    if QUERIES > 1:
        lengths += sequence * QUERIES + QUERIES - 1
    else:
        lengths += sequence
    length = tl.load(lengths)
    if starts is None:
        per = tl.cdiv(tl.cdiv(length, BLOCK_S), SPLITS) * BLOCK_S
        start = split * per
        first = start
    else:
        first = tl.load(starts + sequence * QUERIES)
        begin = first // BLOCK_S * BLOCK_S
        per = tl.cdiv(tl.cdiv(length - begin, BLOCK_S), SPLITS) * BLOCK_S
        start = begin + split * per
    return start, tl.minimum(start + per, length), first


@triton.jit
def of_queries(tokens, sequence, g, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """What `tokens` [batch, QUERIES] say of the query tokens of rows g: see `seen`. Rows past GROUP are any."""
    return tl.load(tokens + sequence * QUERIES + g % QUERIES, mask=g < GROUP, other=0)


@triton.jit
def inside_of(token, first, end, starts):
    """Which tokens of a split are to be read."""
    inside = token < end
    if starts is not None:
        inside = inside & (token >= first)
    return inside


@triton.jit
def page_of(table, at, s, end, PAGE: tl.constexpr, BLOCK_S: tl.constexpr):
    """The page numbers of tokens at + s, of the shape of s, or one if a block, which begins at a multiple of its size, lies in a page.

    Those at `end` and beyond are not loaded.
    """
    token = at if BLOCK_S <= PAGE else at + s
    return tl.load(table + token // PAGE, mask=token < end, other=0)
