"""The GEMM that every fused All-Gather + GEMM variant shares: a persistent loop over output tiles, taken from a dynamic
counter, that waits for the rows of A it needs and computes the own shard first.

A tile of C [m, n] is block_m x block_n. With `shard="m"` (SHARD_K false) it needs rows of one source rank; with `shard="k"`
it needs its rows from every rank and accumulates one K segment per source. Waiting happens between pipelined K loops, never
inside one: loads issued ahead must not pass the wait.
"""

import triton
import triton.language as tl

from autotax.kernels.primitives import EPOCH, NEXT_TILE, arithmetic, dot, translate, wait
from autotax.spaces import order

K_ALIGNMENT = tl.constexpr(128)
"""Columns by which K groups are aligned: a multiple of every BLOCK_K."""

grouped = arithmetic(order.grouped)
remote_row = arithmetic(order.remote_row)


@triton.jit
def next_tile(control):
    """The number of a tile that no other program of this call has taken."""
    return tl.atomic_add(control + NEXT_TILE, 1, sem="relaxed", scope="gpu")


@triton.jit
def load_tile(view, row, col, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Rows x cols of a row-major matrix, zero outside. `view` is a TMA descriptor of blocks ROWS x COLS, or a pointer."""
    if TMA:
        tile = view.load([row, col])
    else:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        tile = tl.load(view + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def columns_of(group, cols, K_GROUPS: tl.constexpr):
    """The first column of a K group of a shard, and the one after its last: whole K blocks, the last group shorter."""
    span = tl.cdiv(cols, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT
    start = group * span
    return start, tl.minimum(start + span, cols)


@triton.jit
def product(
    acc, a, row, a_rows, a_cols, start, end, b, col, n, k0, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc + A[row:, start:end] @ B[col:, k0 + start:k0 + end].T for row-major A [a_rows, a_cols] and B [n, k].

    `start` is a multiple of BLOCK_K, and so is `end` unless it is a_cols.
    """
    for at in range(start, end, BLOCK_K):
        x = load_tile(a, row, at, a_rows, a_cols, a_cols, BLOCK_M, BLOCK_K, TMA_A)
        y = load_tile(b, col, k0 + at, n, k0 + a_cols, k, BLOCK_N, BLOCK_K, TMA_B)
        acc = dot(x, y.T, acc, TARGET)
    return acc


@triton.jit
def wait_rows(
    flags, source, row, rows, group, goal, control,
    CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for a K group of the chunks of CHUNK rows of `source` that hold its rows row ... row + BLOCK_M."""
    chunks = tl.cdiv(rows, CHUNK)
    last = tl.minimum(row + BLOCK_M, rows) - 1
    for chunk in tl.range(row // CHUNK, last // CHUNK + 1, num_stages=1):
        index = (source * K_GROUPS + group) * chunks + chunk
        wait(flags + index, goal, source, index, control, TARGET)


@triton.jit
def store_tile(out, acc, row, col, row_end, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    r = row + tl.arange(0, BLOCK_M)
    c = col + tl.arange(0, BLOCK_N)
    inside = (r < row_end)[:, None] & (c < n)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * n + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def remote_product(
    acc, inbox, source, row, b, col, k0, k, bases, flags, control, rank, n, rows, cols, epoch, signals,
    WORLD: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the product of rows row ... row + BLOCK_M of `source` with B[:, k0:k0 + cols].T, waiting for one K group at a time."""
    slot = epoch & (SLOTS - 1)  # not %, which is negative once the epoch has wrapped around
    if REMOTE:
        wait(flags + source, epoch * signals, source, source, control, TARGET)
        shard = translate(inbox + slot.to(tl.int64) * rows * cols, bases, rank, source)
        acc = product(acc, shard, row, rows, cols, 0, cols, b, col, n, k0, k, BLOCK_M, BLOCK_N, BLOCK_K, False, TMA, TARGET)
    else:
        at = (slot * WORLD + source) * rows + row
        last = SLOTS * WORLD * rows
        for group in tl.range(0, K_GROUPS, num_stages=1):
            start, end = columns_of(group, cols, K_GROUPS)
            wait_rows(flags, source, row, rows, group, epoch * signals, control, CHUNK, K_GROUPS, BLOCK_M, TARGET)
            acc = product(acc, inbox, at, last, cols, start, end, b, col, n, k0, k, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, TARGET)
    return acc


@triton.jit
def gather_rows(
    own, inbox, b, out, bases, flags, control, rank, m, n, rows, cols, signals,
    WORLD: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes tiles of C until none is left, A sharded along M: first those of the own rows, then those of the others'.

    Two loops, not one with a branch: the two pipelines can then use the same shared memory.
    """
    epoch = tl.load(control + EPOCH)
    m_tiles = tl.cdiv(rows, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    tile = next_tile(control)
    while tile < m_tiles * n_tiles:
        place = grouped(tile, m_tiles, n_tiles, GROUP_M)
        row = (place // n_tiles) * BLOCK_M
        col = (place % n_tiles) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = product(acc, own, row, rows, cols, 0, cols, b, col, n, 0, cols, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, TARGET)
        store_tile(out, acc, rank * rows + row, col, tl.minimum((rank + 1) * rows, m), n, BLOCK_M, BLOCK_N)
        tile = next_tile(control)
    while tile < WORLD * m_tiles * n_tiles:
        place = grouped(tile - m_tiles * n_tiles, (WORLD - 1) * m_tiles, n_tiles, GROUP_M)
        position = remote_row(place // n_tiles, m_tiles, WORLD, INTERLEAVED)
        source = (rank + WORLD - position // m_tiles) % WORLD
        row = (position % m_tiles) * BLOCK_M
        col = (place % n_tiles) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = remote_product(
            acc, inbox, source, row, b, col, 0, cols, bases, flags, control, rank, n, rows, cols, epoch, signals,
            WORLD, REMOTE, SLOTS, CHUNK, K_GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
        )  # fmt: skip
        store_tile(out, acc, source * rows + row, col, tl.minimum((source + 1) * rows, m), n, BLOCK_M, BLOCK_N)
        tile = next_tile(control)


@triton.jit
def gather_columns(
    own, inbox, b, out, bases, flags, control, rank, m, n, cols, signals,
    WORLD: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes tiles of C until none is left, A sharded along K: each tile adds the own segment first, then the others'."""
    epoch = tl.load(control + EPOCH)
    m_tiles = tl.cdiv(m, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    k = WORLD * cols
    tile = next_tile(control)
    while tile < m_tiles * n_tiles:
        place = grouped(tile, m_tiles, n_tiles, GROUP_M)
        row = (place // n_tiles) * BLOCK_M
        col = (place % n_tiles) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = product(acc, own, row, m, cols, 0, cols, b, col, n, rank * cols, k, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, TARGET)
        for step in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - step) % WORLD
            acc = remote_product(
                acc, inbox, source, row, b, col, source * cols, k, bases, flags, control, rank, n, m, cols, epoch, signals,
                WORLD, REMOTE, SLOTS, CHUNK, K_GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
            )  # fmt: skip
        store_tile(out, acc, row, col, m, n, BLOCK_M, BLOCK_N)
        tile = next_tile(control)


@triton.jit
def gather_gemm(
    own, inbox, b, out, bases, flags, control, rank, m, n, rows, cols, signals,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """A program's part of C = gather(A) @ B.T.

    The own shard [rows, cols] is read through `own`; the shards of the others lie in `inbox` [SLOTS, WORLD, rows, cols],
    or, with REMOTE, in the inbox [SLOTS, rows, cols] of their owner (then `inbox` is a plain pointer). Flags are
    [WORLD, K_GROUPS, chunks], with REMOTE [WORLD]; what a flag stands for is there after `signals` signals a call.
    """
    if SHARD_K:
        gather_columns(
            own, inbox, b, out, bases, flags, control, rank, m, n, cols, signals,
            WORLD, REMOTE, SLOTS, CHUNK, K_GROUPS, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
        )  # fmt: skip
    else:
        gather_rows(
            own, inbox, b, out, bases, flags, control, rank, m, n, rows, cols, signals,
            WORLD, REMOTE, SLOTS, CHUNK, K_GROUPS, INTERLEAVED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
        )  # fmt: skip
