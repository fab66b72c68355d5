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
def product(
    acc, a, row, a_rows, a_cols, b, col, n, k0, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc + A[row:, 0:a_cols] @ B[col:, k0:k0 + a_cols].T for row-major A [a_rows, a_cols] and B [n, k]."""
    for i in range(0, tl.cdiv(a_cols, BLOCK_K)):
        x = load_tile(a, row, i * BLOCK_K, a_rows, a_cols, a_cols, BLOCK_M, BLOCK_K, TMA_A)
        y = load_tile(b, col, k0 + i * BLOCK_K, n, k0 + a_cols, k, BLOCK_N, BLOCK_K, TMA_B)
        acc = dot(x, y.T, acc, TARGET)
    return acc


@triton.jit
def wait_rows(flags, source, row, rows, goal, control, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, TARGET: tl.constexpr):
    """Waits for the chunks of CHUNK rows of `source` that hold its rows row ... row + BLOCK_M."""
    chunks = tl.cdiv(rows, CHUNK)
    last = tl.minimum(row + BLOCK_M, rows) - 1
    for chunk in tl.range(row // CHUNK, last // CHUNK + 1, num_stages=1):
        index = source * chunks + chunk
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
    WORLD: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows row ... row + BLOCK_M of `source` and adds their product with B[:, k0:k0 + cols].T."""
    slot = epoch % SLOTS
    if REMOTE:
        wait(flags + source, epoch * signals, source, source, control, TARGET)
        shard = translate(inbox + slot.to(tl.int64) * rows * cols, bases, rank, source)
        acc = product(acc, shard, row, rows, cols, b, col, n, k0, k, BLOCK_M, BLOCK_N, BLOCK_K, False, TMA, TARGET)
    else:
        wait_rows(flags, source, row, rows, epoch * signals, control, CHUNK, BLOCK_M, TARGET)
        at = (slot * WORLD + source) * rows + row
        end = SLOTS * WORLD * rows
        acc = product(acc, inbox, at, end, cols, b, col, n, k0, k, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, TARGET)
    return acc


@triton.jit
def gather_rows(
    own, inbox, b, out, bases, flags, control, rank, m, n, rows, cols, signals,
    WORLD: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
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
        acc = product(acc, own, row, rows, cols, b, col, n, 0, cols, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, TARGET)
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
            WORLD, REMOTE, SLOTS, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
        )  # fmt: skip
        store_tile(out, acc, source * rows + row, col, tl.minimum((source + 1) * rows, m), n, BLOCK_M, BLOCK_N)
        tile = next_tile(control)


@triton.jit
def gather_columns(
    own, inbox, b, out, bases, flags, control, rank, m, n, cols, signals,
    WORLD: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, GROUP_M: tl.constexpr,
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
        acc = product(acc, own, row, m, cols, b, col, n, rank * cols, k, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, TARGET)
        for step in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - step) % WORLD
            acc = remote_product(
                acc, inbox, source, row, b, col, source * cols, k, bases, flags, control, rank, n, m, cols, epoch, signals,
                WORLD, REMOTE, SLOTS, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
            )  # fmt: skip
        store_tile(out, acc, row, col, m, n, BLOCK_M, BLOCK_N)
        tile = next_tile(control)


@triton.jit
def gather_gemm(
    own, inbox, b, out, bases, flags, control, rank, m, n, rows, cols, signals,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """A program's part of C = gather(A) @ B.T.

    The own shard [rows, cols] is read through `own`; the shards of the others lie in `inbox` [SLOTS, WORLD, rows, cols],
    or, with REMOTE, in the inbox [SLOTS, rows, cols] of their owner (then `inbox` is a plain pointer). A chunk (with REMOTE:
    a shard) has arrived when its flag has been signalled `signals` times a call.
    """
    if SHARD_K:
        gather_columns(
            own, inbox, b, out, bases, flags, control, rank, m, n, cols, signals,
            WORLD, REMOTE, SLOTS, CHUNK, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
        )  # fmt: skip
    else:
        gather_rows(
            own, inbox, b, out, bases, flags, control, rank, m, n, rows, cols, signals,
            WORLD, REMOTE, SLOTS, CHUNK, INTERLEAVED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
        )  # fmt: skip
