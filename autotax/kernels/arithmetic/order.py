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
