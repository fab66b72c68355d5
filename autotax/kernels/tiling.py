"""The order of work, as integer arithmetic: which tile, chunk or split a program takes next.

These functions are plain Python that Triton compiles too: the kernels run the very lines that the property tests
enumerate on the CPU. Only `+ - * // %`, comparisons and conditional expressions may be used here.
"""

from __future__ import annotations

from typing import NamedTuple


def grouped(tile, rows, cols, group):
    """Walks a grid of rows x cols tiles in bands of `group` rows, down each column of the band; a bijection for any sizes.

    Returns row * cols + col. The last band may be lower (a fixed group size would lose tiles there).
    """
    band = tile // (group * cols)
    first = band * group
    height = group if rows - first > group else rows - first
    within = tile - band * group * cols
    return (first + within % height) * cols + within // height


def remote_row(row, rows, world, interleaved):
    """Which (step, row block) is the row-th to be computed of the shards of others; step i is the shard of rank - i.

    Source after source ("ring"), or one row block of every source in turn ("interleaved").
    Returns step * rows + row block with step in 1..world-1; a bijection from range((world-1)*rows).
    """
    others = world - 1 if world > 1 else 1
    return (1 + row % others) * rows + row // others if interleaved != 0 else rows + row


def push_unit(unit, chunks, pieces, world, interleaved):
    """Which (hop, chunk, piece) is the unit-th to be pushed: hop i goes to rank + i, so that its reader meets it at step i.
    Or to be fetched: then hop i comes from rank - i, which its reader meets at step i too.

    Returns (hop * chunks + chunk) * pieces + piece with hop in 1..world-1; a bijection from range((world-1)*chunks*pieces).
    """
    others = world - 1 if world > 1 else 1
    piece = unit % pieces
    rest = unit // pieces
    ring = (1 + rest // chunks) * chunks + rest % chunks
    mixed = (1 + rest % others) * chunks + rest // others
    return (mixed if interleaved != 0 else ring) * pieces + piece


def whole_tiles(tiles, programs, splits):
    """How many tiles are computed whole: full waves of programs. With one split all are."""
    return tiles if splits == 1 else tiles - tiles % programs


def tile_of(item, whole, splits):
    """The tile of a piece of work: whole tiles come first, then `splits` parts of each other tile."""
    return item if item < whole else whole + (item - whole) // splits


def first_block(item, whole, splits, blocks):
    """The first of the K blocks of a piece of work; parts are equal, but the last ones of a tile may be shorter or empty."""
    at = (item - whole) % splits * ((blocks + splits - 1) // splits)
    return 0 if item < whole else (at if at < blocks else blocks)


def last_block(item, whole, splits, blocks):
    """The K block after the last one of a piece of work."""
    at = ((item - whole) % splits + 1) * ((blocks + splits - 1) // splits)
    return blocks if item < whole else (at if at < blocks else blocks)


def chiplet(program, programs, chiplets):
    """Gives programs that the hardware puts on one chiplet (program % chiplets) neighbouring work; a bijection for any counts."""
    per = (programs + chiplets - 1) // chiplets
    tall = programs % chiplets
    tall = chiplets if tall == 0 else tall
    die = program % chiplets
    local = program // chiplets
    return die * per + local if die < tall else tall * per + (die - tall) * (per - 1) + local


def place(row, rows, heads, share):
    """Where a row (sequence * heads + head) stands when those of each rank come together: rank r owns heads r*share and on.

    Places are rank * (rows of a rank) + sequence * share + own head; a bijection if heads is a multiple of share.
    """
    head = row % heads
    return (head // share * (rows // heads) + row // heads) * share + head % share


class Product(NamedTuple):
    """A product of the vendor's library: what it waits for, and the shards of A that it takes. Both are (first, end)."""

    hops: tuple[int, int]
    """Hop h brings the shard of rank - h."""
    sources: tuple[int, int]


def later_products(rank: int, world: int, products: str) -> list[Product]:
    """What follows the product of the own shard, in order; for the host, not for kernels. `products` as in the space.

    With `two` they are the sources below the own rank, which arrive first, and those above.
    """
    if products == "one":
        return [Product((1, world), (0, world))]
    if products == "two":
        below, above = Product((1, rank + 1), (0, rank)), Product((rank + 1, world), (rank + 1, world))
        return [product for product in (below, above) if product.sources[0] < product.sources[1]]
    return [Product((hop, hop + 1), ((rank - hop) % world, (rank - hop) % world + 1)) for hop in range(1, world)]


# How `decomposed` cuts the shard that arrives last, whose product nothing hides: for its host side and for the plan.

PIECES = {"halves": 2}
"""The ways of `products` that are `each` with the last shard in pieces. Four were tried: they are slower than two or one."""


def last_pieces(rows: int, products: str) -> list[tuple[int, int]]:
    """The rows (first, end) of each piece of the last shard. All pieces are as high, but the last ones may be lower or empty."""
    count = PIECES.get(products, 1)
    height = -(-rows // count)
    return [(min(piece * height, rows), min((piece + 1) * height, rows)) for piece in range(count)]


# Who does which piece of work of a GEMM: what is dealt out beforehand. Integer arithmetic for kernels, as in `order`.

def pieces(tiles, whole, splits):
    """How many pieces of work the first `tiles` tiles are: see `order.tile_of`."""
    return tiles if tiles < whole else whole + (tiles - whole) * splits


def dealt_out(items, programs, comm, splits):
    """How many pieces of work are dealt out beforehand, in turn, to the programs that do not communicate: their loop over
    whole tiles is one pipeline. The rest go to whoever is free first.

    All are, unless the `comm` programs can save a wave by joining: then not the last two waves. None where tiles are cut,
    for parts are shorter.
    """
    workers = programs - comm
    waves = (items + programs - 1) // programs
    first = items if (items + workers - 1) // workers == waves else (waves - 2) * workers
    return first if splits == 1 and first > 0 else 0


# Orders of work for GPUs of several dies, each with an L2 of its own. Integer arithmetic for kernels, as in `order`.

def remapped(item, first, end, programs, dies):
    """What is done in place of an item of first ... end - 1 by programs that take every `programs`-th item, so that programs of one
    die do neighbouring ones at a time; a bijection for any numbers.

    With `order.grouped` in groups as high as the grid, a die has some whole columns of tiles of each wave, a strip of N, and walks M.
    """
    wave = item - item % programs
    start = wave if wave > first else first
    stop = wave + programs if wave + programs < end else end
    count = stop - start
    place = item - start
    # As `order.chiplet` of `count` programs.
    per = (count + dies - 1) // dies
    tall = count % dies
    tall = dies if tall == 0 else tall
    die = place % dies
    local = place // dies
    return start + (die * per + local if die < tall else tall * per + (die - tall) * (per - 1) + local)


# What warps with roles do, for kernels and spaces alike: how they share out a tile, and in which boxes they send a shard.

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
