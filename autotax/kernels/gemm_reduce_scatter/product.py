"""The GEMM of every fused variant: a persistent loop over the tiles of a rank's partial sum, which go to their owners.

The partial sum is C_r = A @ B.T, [m, n]. Rank d owns rows d*R ... d*R + R - 1, with R = ceil(m / ranks); rows past m count as
zeros. A tile, block_m x block_n, has rows of one owner. Tiles of other owners come first, tiles of rank + 1 before tiles of rank
+ 2, so that every rank receives from one rank at a time. This rank's tiles come last and hide the transfer of the others.

A flag stands for TILES neighbouring tiles of one row of tiles. The program that finishes the last of them raises the flag to the
number of the call, by adding the difference. So a call with fewer rows may skip flags.
"""

import triton
import triton.language as tl

from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.gemm import load_tile
from autotax.kernels.primitives import arithmetic, count, dot, flag_address, signal, translate

SUM_ROWS = tl.constexpr(64)
"""Rows that are added up at a time in a tile that was computed in parts."""

grouped = arithmetic(tiling.grouped)
remote_row = arithmetic(tiling.remote_row)
whole_tiles = arithmetic(tiling.whole_tiles)
tile_of = arithmetic(tiling.tile_of)
first_block = arithmetic(tiling.first_block)
last_block = arithmetic(tiling.last_block)
pieces = arithmetic(tiling.pieces)


@triton.jit
def multiplied(
    acc, a, row, m, b, col, n, k, start, end, KN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc + A[row:, start:end] @ B[col:, start:end].T for A [m, k] and B [n, k], with KN [k, n]; zero outside.

    `start` is a multiple of BLOCK_K, and so is `end` unless it is k.
    """
    for at in range(start, end, BLOCK_K):
        x = load_tile(a, row, at, m, k, k, BLOCK_M, BLOCK_K, TMA, ALIGNED_K)
        if KN:
            y = load_tile(b, at, col, k, n, n, BLOCK_K, BLOCK_N, TMA, ALIGNED_N)
        else:
            y = load_tile(b, col, at, n, k, k, BLOCK_N, BLOCK_K, TMA, ALIGNED_K).T
        acc = dot(x, y, acc, TARGET)
    return acc


@triton.jit
def part_of_tile(parts, first, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows first ... first + ROWS - 1 of the sum of SPLITS parts [BLOCK_M, BLOCK_N], which other programs have just written.

    On NVIDIA `.cg` bypasses the L1. On AMD it is only a hint; there the acquire of `count` has invalidated stale lines.
    """
    within = (first + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.load(parts + within, cache_modifier=".cg")
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + part * BLOCK_M * BLOCK_N + within, cache_modifier=".cg")
    return total


@triton.jit
def last_of_parts(
    acc, partials, finished, cut, part, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TARGET: tl.constexpr
):
    """Stores a part of the cut-th tile that is computed in parts. Returns True for the last part: then all parts are complete."""
    parts = partials + cut.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(parts + part * BLOCK_M * BLOCK_N + within, acc)
    last = count(finished + cut, TARGET, "gpu") == SPLITS - 1
    if last:
        tl.store(finished + cut, 0)
    return last


@triton.jit
def rounded(block, TYPE: tl.constexpr, TARGET: tl.constexpr):
    """Rounds a float32 block to another type, to the nearest value."""
    if TARGET == "interpreter" and tl.bfloat16 == TYPE:
        # The interpreter's own conversion truncates, and it turns numbers below the smallest normal number into larger ones.
        bits = block.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        block = bits.to(tl.float32, bitcast=True)
    return block.to(TYPE)


@triton.jit
def store_rows(
    matrix, block, row, row_end, col, n, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """matrix[row:row_end, col:n] = block in the type of `matrix`. It is row-major with n columns, a multiple of ALIGNED."""
    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    size: tl.constexpr = matrix.dtype.element_ty.primitive_bitwidth // 8
    # The base comes from an integer. Without the alignment hint the stores would be two bytes wide.
    at = tl.multiple_of(matrix + r.to(tl.int64)[:, None] * n + c[None, :], (size, ALIGNED * size))
    tl.store(at, rounded(block, matrix.dtype.element_ty, TARGET), mask=(r < row_end)[:, None] & (c < n)[None, :])


@triton.jit
def place_of(slot, owner, source, room, n, WORLD: tl.constexpr, PULL: tl.constexpr):
    """Elements before the rows of `source` for `owner`: the inbox is [slot, source, room, n], the outbox of PULL goes by owner.
    """
    return (slot * WORLD + (owner if PULL else source)) * (room * tl.cast(n, tl.int64))


@triton.jit
def tell(where, counts, raised, flags, bases, rank, epoch, n_tiles, most_blocks, TILES: tl.constexpr, TARGET: tl.constexpr):
    """Counts a stored tile. For the last of a flag's tiles it raises the flag [source, most_blocks, groups] at the owner.

    `where` is (owner * most_blocks + row of tiles) * n_tiles + tile of the row.
    """
    groups = tl.cdiv(n_tiles, TILES)
    line = where // n_tiles
    owner = line // most_blocks
    group = where % n_tiles // TILES
    index = (rank * most_blocks + line % most_blocks) * groups + group
    mine = line * groups + group
    if TILES == 1:
        before = tl.atomic_xchg(raised + mine, epoch, sem="relaxed", scope="gpu")
        signal(flag_address(flags, index, bases, rank, owner), epoch - before, TARGET, "sys")
    else:
        if count(counts + mine, TARGET, "sys") == tl.minimum(TILES, n_tiles - group * TILES) - 1:
            tl.store(counts + mine, 0)
            before = tl.atomic_xchg(raised + mine, epoch, sem="relaxed", scope="gpu")
            signal(flag_address(flags, index, bases, rank, owner), epoch - before, TARGET, "sys")


@triton.jit
def tell_flat(where, raised, flags, bases, rank, epoch, n_tiles, most_blocks):
    """`tell` for CUDA with one flag per tile, in a flattened loop: a `debug_barrier` would keep Triton from pipelining it.

    The compiled code passes the result of the exchange to all threads behind a barrier. This barrier comes after the stores of
    all threads and before the release, so it replaces `settle`. Tests look for it in the PTX.
    """
    line = where // n_tiles
    owner = line // most_blocks
    index = (rank * most_blocks + line % most_blocks) * n_tiles + where % n_tiles
    before = tl.atomic_xchg(raised + where, epoch, sem="relaxed", scope="gpu")
    tl.atomic_add(flag_address(flags, index, bases, rank, owner), epoch - before, sem="release", scope="sys")


@triton.jit
def multiply_and_send(
    a, b, box, partials, finished, counts, raised, flags, bases, rank, epoch, worker, workers, m, n, k, rows, room,
    WORLD: tl.constexpr, PULL: tl.constexpr, KN: tl.constexpr, INTERLEAVED: tl.constexpr, LATE: tl.constexpr, FLAT: tl.constexpr,
    TILES: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes every workers-th tile from `worker` on and stores it where its owner finds it. Waits for no other program.

    With LATE a tile is signalled after the next tile is stored. By then its stores have arrived, and the release is fast. FLAT
    keeps the pipeline full from tile to tile; it requires LATE, whole tiles and one flag per tile.
    """
    m_tiles = tl.cdiv(rows, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    most_blocks = tl.cdiv(room, BLOCK_M)
    remote = (WORLD - 1) * m_tiles * n_tiles
    tiles = WORLD * m_tiles * n_tiles
    whole = whole_tiles(tiles, workers, SPLITS)
    items = pieces(tiles, whole, SPLITS)
    blocks = tl.cdiv(k, BLOCK_K)
    slot = epoch & 1
    untold = -1
    for item in tl.range(worker, items, workers, flatten=FLAT):
        tile = tile_of(item, whole, SPLITS)
        theirs = tile < remote
        place = grouped(tl.where(theirs, tile, tile - remote), tl.where(theirs, (WORLD - 1) * m_tiles, m_tiles), n_tiles, GROUP_M)
        position = tl.where(theirs, remote_row(place // n_tiles, m_tiles, WORLD, INTERLEAVED), place // n_tiles)
        owner = (rank + position // m_tiles) % WORLD
        row = position % m_tiles * BLOCK_M
        col = place % n_tiles * BLOCK_N
        start, end = 0, k
        if SPLITS > 1:
            start = first_block(item, whole, SPLITS, blocks) * BLOCK_K
            end = tl.minimum(last_block(item, whole, SPLITS, blocks) * BLOCK_K, k)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = multiplied(
            acc, a, owner * rows + row, m, b, col, n, k, start, end,
            KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED_K, ALIGNED_N, TARGET,
        )  # fmt: skip
        destination = box + place_of(slot, owner, rank, room, n, WORLD, PULL)
        if not PULL:
            destination = translate(destination, bases, rank, owner)
        where = (owner * most_blocks + row // BLOCK_M) * n_tiles + place % n_tiles
        if LATE:
            if untold >= 0:
                if FLAT:
                    tell_flat(untold, raised, flags, bases, rank, epoch, n_tiles, most_blocks)
                else:
                    tell(untold, counts, raised, flags, bases, rank, epoch, n_tiles, most_blocks, TILES, TARGET)
            untold = -1
        complete = item >= 0
        if SPLITS > 1:
            if item >= whole:
                cut = (item - whole) // SPLITS
                complete = last_of_parts(acc, partials, finished, cut, (item - whole) % SPLITS, SPLITS, BLOCK_M, BLOCK_N, TARGET)
                if complete:
                    parts = partials + cut.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N
                    height: tl.constexpr = SUM_ROWS if SUM_ROWS < BLOCK_M else BLOCK_M
                    for first in tl.range(0, BLOCK_M, height, num_stages=1):
                        total = part_of_tile(parts, first, SPLITS, height, BLOCK_M, BLOCK_N)
                        store_rows(destination, total, row + first, rows, col, n, height, BLOCK_N, ALIGNED_N, TARGET)
            else:
                store_rows(destination, acc, row, rows, col, n, BLOCK_M, BLOCK_N, ALIGNED_N, TARGET)
        else:
            store_rows(destination, acc, row, rows, col, n, BLOCK_M, BLOCK_N, ALIGNED_N, TARGET)
        if complete:
            if LATE:
                untold = where
            else:
                tell(where, counts, raised, flags, bases, rank, epoch, n_tiles, most_blocks, TILES, TARGET)
    if LATE:
        if untold >= 0:
            tell(untold, counts, raised, flags, bases, rank, epoch, n_tiles, most_blocks, TILES, TARGET)
