"""What warps with roles do, for kernels and spaces alike: how they share out a tile, and in which boxes they send a shard.

The sides of a tile are X and Y: groups of four warps multiply GROUP_ROWS of X each, by all rows of Y, part by part. Integer
arithmetic, as in `order`.
"""

from __future__ import annotations

BLOCK_K = 64
"""Columns of K in a strip: what the swizzle of shared memory spans in 16-bit elements."""
GROUP_ROWS = 64
"""What a product of Hopper's takes of X."""
PART_ROWS = 128
"""The most of Y that one product takes; 256 would ask for more registers than three groups have."""
K_ALIGNMENT = 128
"""Columns by which K groups are aligned: a multiple of every block_k, in all variants."""
MOST_RANKS = 8
"""A kernel takes a view of each peer's inbox as an argument."""
BLOCKS_M = (64, 128, 256)
BLOCKS_OF_B = (128, 192)
"""Blocks of B that may be X, for two and for three groups."""
BLOCKS_BESIDE_A = {64: (64, 80, 96, 112), 128: (48, 64, 80, 96, 112, 128, 160, 224, 256, 320)}
"""Blocks of B that may be Y, by the rows of A that are X: one group's or two groups'."""

BLOCKS_BELOW_EACH_OTHER = 8
"""Of C, which `push_words` computes side by side, so that they share blocks of B."""
TILES_BY_WORDS = {16: (64, 128), 32: (64, 128), 64: (64, 80, 96, 112, 128), 128: (48, 64, 80, 96, 112, 128, 160)}
"""Of `push_words`: blocks of B by the rows of A. Those of 16 and 32 rows, and 64 x 128, have B for X."""


def x_is_a_block_of_b(block_m: int, block_n: int) -> bool:
    """Which block of a tile is X: that of A where groups can share it out, else that of B."""
    return block_n not in BLOCKS_BESIDE_A.get(block_m, ())


def is_a_tile(block_m: int, block_n: int) -> bool:
    return block_m in BLOCKS_M and (not x_is_a_block_of_b(block_m, block_n) or block_n in BLOCKS_OF_B)


def sides(block_m: int, block_n: int) -> tuple[int, int]:
    """(X, Y) of a tile."""
    return (block_n, block_m) if x_is_a_block_of_b(block_m, block_n) else (block_m, block_n)


def parts_of(y: int) -> list[int]:
    """The rows of Y that are multiplied at a time: powers of two, the largest first, three at most."""
    parts = []
    while y:
        parts.append(min(PART_ROWS, 1 << (y.bit_length() - 1)))
        y -= parts[-1]
    return parts


# A box is GROUP_ROWS x BLOCK_K. Boxes go out chunk by chunk of rows, in a chunk strip by strip of BLOCK_K columns.
# Kernels compile what follows, where no global number may be used.


def box_row(number, rows, strips, chunk):
    """The first row of the number-th box of a shard; `strips` a row of boxes, `chunk` rows a chunk, the last one less."""
    first = number // (chunk // 64 * strips) * chunk
    high = (chunk if rows - first > chunk else rows - first) // 64
    return first + (number - first // 64 * strips) % high * 64


def box_strip(number, rows, strips, chunk):
    """The strip of the same box."""
    first = number // (chunk // 64 * strips) * chunk
    high = (chunk if rows - first > chunk else rows - first) // 64
    return (number - first // 64 * strips) // high


def boxes_of(group, part, rows, cols, span, chunk):
    """How many boxes a K group of `span` columns is of the part-th chunk: so many signals say that it is there."""
    width = span if cols - group * span > span else cols - group * span
    high = chunk if rows - part * chunk > chunk else rows - part * chunk
    return (width + 63) // 64 * (high // 64)
