"""The order of work, as integer arithmetic: which tile, chunk or split a program takes next.

These functions are plain Python that Triton also compiles. The kernels run the same lines that the property tests enumerate on
the CPU. Only `+ - * // %`, comparisons and conditional expressions may be used here.
"""

from __future__ import annotations

from typing import NamedTuple


def grouped(tile, rows, cols, group):
    """Walks a grid of rows x cols tiles in bands of `group` rows, down each column of the band; a bijection for any sizes.

    Returns row * cols + col. The last band may be lower (with a fixed group size some tiles would be skipped there).
    """
    band = tile // (group * cols)
    first = band * group
    height = group if rows - first > group else rows - first
    within = tile - band * group * cols
    return (first + within % height) * cols + within // height


def remote_row(row, rows, world, interleaved):
    """Returns the row block of the other ranks' shards that this rank computes in turn `row`. Step i is the shard of rank - i.

    The order is one source after the other ("ring"), or one row block of every source in turn ("interleaved"). Returns step *
    rows + row block with step in 1..world-1; a bijection from range((world-1)*rows).
    """
    others = world - 1 if world > 1 else 1
    return (1 + row % others) * rows + row // others if interleaved != 0 else rows + row


def push_unit(unit, chunks, pieces, world, interleaved):
    """Returns the (hop, chunk, piece) that is pushed in turn `unit`. Hop i, to rank + i or from rank - i, is needed at step i.

    Returns (hop * chunks + chunk) * pieces + piece with hop in 1..world-1; a bijection from range((world-1)*chunks*pieces).
    """
    others = world - 1 if world > 1 else 1
    piece = unit % pieces
    rest = unit // pieces
    ring = (1 + rest // chunks) * chunks + rest % chunks
    mixed = (1 + rest % others) * chunks + rest // others
    return (mixed if interleaved != 0 else ring) * pieces + piece


def owner_of(block, programs, world, turned):
    """Returns the rank that adds up a block. Of `world` blocks from a multiple of `world` on, each has another owner.

    Program p handles blocks p, p + programs, and so on. With `turned` the owner changes from one of these to the next. Without it
    they have one owner where `programs` is a multiple of `world`.
    """
    stride = (programs + world - 1) // world * world
    return (block + block // stride) % world if turned != 0 else block % world


def whole_tiles(tiles, programs, splits):
    """How many tiles are computed whole: as many as make full waves of programs. With one split all tiles are."""
    return tiles if splits == 1 else tiles - tiles % programs


def tile_of(item, whole, splits):
    """The tile of a work item: whole tiles come first, then `splits` parts of each other tile."""
    return item if item < whole else whole + (item - whole) // splits


def first_block(item, whole, splits, blocks):
    """The first K block of a work item. Parts are equal, but the last parts of a tile may be shorter or empty."""
    at = (item - whole) % splits * ((blocks + splits - 1) // splits)
    return 0 if item < whole else (at if at < blocks else blocks)


def last_block(item, whole, splits, blocks):
    """The K block after the last block of a work item."""
    at = ((item - whole) % splits + 1) * ((blocks + splits - 1) // splits)
    return blocks if item < whole else (at if at < blocks else blocks)


def chiplet(program, programs, chiplets):
    """Gives neighbouring work to programs of one chiplet, which is program % chiplets; a bijection for any counts."""
    per = (programs + chiplets - 1) // chiplets
    tall = programs % chiplets
    tall = chiplets if tall == 0 else tall
    die = program % chiplets
    local = program // chiplets
    return die * per + local if die < tall else tall * per + (die - tall) * (per - 1) + local


def place(row, rows, heads, share):
    """The place of a row (sequence * heads + head) when the rows of each rank are stored together; a rank owns `share` heads.

    It is rank * (rows per rank) + sequence * share + local head; a bijection if heads is a multiple of share.
    """
    head = row % heads
    return (head // share * (rows // heads) + row // heads) * share + head % share


class Product(NamedTuple):
    """One call of the vendor's GEMM: the hops that it waits for, and the shards of A that it reads. Both are (first, end)."""

    hops: tuple[int, int]
    """Hop h brings the shard of rank - h."""
    sources: tuple[int, int]


def later_products(rank: int, world: int, products: str) -> list[Product]:
    """The GEMM calls after the one on this rank's shard, in order, for the parameter `products`. Runs on the host only.

    With `two` the first takes the sources below this rank, whose shards arrive first, and the second those above it.
    """
    if products == "one":
        return [Product((1, world), (0, world))]
    if products == "two":
        below, above = Product((1, rank + 1), (0, rank)), Product((rank + 1, world), (rank + 1, world))
        return [product for product in (below, above) if product.sources[0] < product.sources[1]]
    return [Product((hop, hop + 1), ((rank - hop) % world, (rank - hop) % world + 1)) for hop in range(1, world)]


# How `decomposed` cuts the shard that arrives last. Nothing hides its product. The host side and the plan use this.

PIECES = {"halves": 2}
"""Values of `products` that work like `each` but cut the last shard into pieces. Four pieces were slower than two or one."""


def last_pieces(rows: int, products: str) -> list[tuple[int, int]]:
    """The rows (first, end) of each piece of the last shard. The last piece may be lower or empty."""
    count = PIECES.get(products, 1)
    height = -(-rows // count)
    return [(min(piece * height, rows), min((piece + 1) * height, rows)) for piece in range(count)]


# Static assignment of the work items of a GEMM to programs. Integer arithmetic for kernels, like the functions above.

def pieces(tiles, whole, splits):
    """How many work items the first `tiles` tiles make; see `tile_of`."""
    return tiles if tiles < whole else whole + (tiles - whole) * splits


def dealt_out(items, programs, comm, splits):
    """How many work items are assigned statically, round robin, to programs that do not communicate: one pipeline.

    Programs that become free take the other items. All are assigned, unless the `comm` programs can save a wave by joining; then
    the last two waves are not. With `splits` > 1 none is, because parts are shorter than whole tiles.
    """
    workers = programs - comm
    waves = (items + programs - 1) // programs
    first = items if (items + workers - 1) // workers == waves else (waves - 2) * workers
    return first if splits == 1 and first > 0 else 0


# Orders of work for GPUs of several dies with an L2 each. Integer arithmetic for kernels, like the functions above.

def remapped(item, first, end, programs, dies):
    """Permutes the items first ... end - 1 so that programs of a die compute neighbouring items; a bijection for any numbers.

    With `grouped` in groups as high as the grid, a die has whole columns of tiles of each wave: a strip of N, walked along M.
    """
    wave = item - item % programs
    start = wave if wave > first else first
    stop = wave + programs if wave + programs < end else end
    count = stop - start
    place = item - start
    # Like `chiplet` for `count` programs.
    per = (count + dies - 1) // dies
    tall = count % dies
    tall = dies if tall == 0 else tall
    die = place % dies
    local = place // dies
    return start + (die * per + local if die < tall else tall * per + (die - tall) * (per - 1) + local)


# Warp-specialized kernels: how warp groups divide a tile, and in which boxes a shard is sent. Kernels and spaces use this.

BLOCK_K = 64
"""Columns of K in a strip: the swizzle of shared memory spans 64 elements of 16 bits."""
GROUP_ROWS = 64
"""Rows of X that one Hopper WGMMA instruction multiplies."""
GROUP_WARPS = 4
"""Warps that one such instruction takes: a group."""
PART_ROWS = 128
"""Most rows of Y in one product; 256 rows would need more registers than three warp groups have."""
MOST_TOGETHER = 192
"""Most rows of Y whose parts are multiplied together in a kernel for e4m3, where groups keep the sums of a strip of K beside those
of all strips. More would not fit in registers, so parts of a wider Y take turns.
"""
K_ALIGNMENT = 128
"""K groups are aligned to this many columns: a multiple of every block_k, in all variants."""
MOST_RANKS = 8
"""A kernel takes a view of each peer's inbox as an argument, so the number of ranks is limited."""
BLOCKS_M = (64, 128, 256)
BLOCKS_OF_B = (128, 192)
"""Blocks of B that may be X, for two and for three warp groups."""
BLOCKS_BESIDE_A = {64: (64, 80, 96, 112), 128: (48, 64, 80, 96, 112, 128, 160, 224, 256, 320)}
"""Blocks of B that may be Y, by the rows of A that are X: the rows of one warp group or of two."""

BLOCKS_BELOW_EACH_OTHER = 8
"""Blocks of C in one column that `push_words` computes side by side, so that they share blocks of B."""
TILES_BY_WORDS = {16: (64, 128), 32: (64, 128), 64: (64, 80, 96, 112, 128), 128: (48, 64, 80, 96, 112, 128, 160)}
"""Tiles of `push_words`: blocks of B by the rows of A. Tiles of 16 and 32 rows, and 64 x 128, have B as X."""


def x_is_a_block_of_b(block_m: int, block_n: int) -> bool:
    """Returns whether X is the block of B. X is the block of A where warp groups can divide that."""
    return block_n not in BLOCKS_BESIDE_A.get(block_m, ())


def is_a_tile(block_m: int, block_n: int) -> bool:
    return block_m in BLOCKS_M and (not x_is_a_block_of_b(block_m, block_n) or block_n in BLOCKS_OF_B)


def sides(block_m: int, block_n: int) -> tuple[int, int]:
    """(X, Y) of a tile."""
    return (block_n, block_m) if x_is_a_block_of_b(block_m, block_n) else (block_m, block_n)


def parts_of(y: int) -> list[int]:
    """The rows of Y that are multiplied at a time: at most three powers of two, the largest first."""
    parts = []
    while y:
        parts.append(min(PART_ROWS, 1 << (y.bit_length() - 1)))
        y -= parts[-1]
    return parts


def staged_columns(block_n: int, stages: int) -> int:
    """Most columns of C that a group of warps stages at a time in a kernel for e4m3. Four stages of the widest tile leave no room
    for those of a whole part.
    """
    return PART_ROWS // 2 if block_n == 2 * PART_ROWS and stages > 3 else PART_ROWS


ROLES = "roles-"
"""Begins the name of a product by warps with roles."""


class ProductTile(NamedTuple):
    """The tile of a product of e4m3 as the product's name says: 64x128x5x4 is Triton's, with its rows, columns, stages and warps.

    64x128x2x4x2 has strips of twice 128 columns of K. roles-64x128x8x4x2 is multiplied by four warps with roles.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    strips: int = 1

    @classmethod
    def of(cls, name: object) -> ProductTile:
        return cls(*map(int, str(name).removeprefix(ROLES).split("x")))

    @property
    def groups(self) -> int:
        """Groups of rows in a product by warps with roles."""
        return self.rows // GROUP_ROWS

    @property
    def turns(self) -> int:
        """Groups of warps that take turns at the same rows there."""
        return self.warps // (GROUP_WARPS * self.groups)


def steps_before(step, group, groups):
    """How many steps of a tile, whose first is the step-th of a program, come before the first of a group. Groups take turns.

    The group of a step is the rest of its number, so a buffer has one group if there is a multiple of `groups` steps of buffers.
    """
    return (group + groups - step % groups) % groups


# A box is GROUP_ROWS x BLOCK_K. Boxes are sent chunk by chunk of rows, and within a chunk strip by strip of BLOCK_K columns.
# Kernels compile the functions below, which therefore use no global constants.


def box_row(number, rows, strips, chunk):
    """The first row of the number-th box of a shard. A row of boxes has `strips` boxes; the last chunk may have fewer rows."""
    first = number // (chunk // 64 * strips) * chunk
    high = (chunk if rows - first > chunk else rows - first) // 64
    return first + (number - first // 64 * strips) % high * 64


def box_strip(number, rows, strips, chunk):
    """The strip of the same box."""
    first = number // (chunk // 64 * strips) * chunk
    high = (chunk if rows - first > chunk else rows - first) // 64
    return (number - first // 64 * strips) // high


def boxes_of(group, part, rows, cols, span, chunk):
    """How many boxes a K group of `span` columns has in the part-th chunk; its flag is raised after as many."""
    width = span if cols - group * span > span else cols - group * span
    high = chunk if rows - part * chunk > chunk else rows - part * chunk
    return (width + 63) // 64 * (high // 64)
