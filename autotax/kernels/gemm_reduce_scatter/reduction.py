"""The owner of some rows of C adds up all partial sums and optional addends, in float32 and in the order of the ranks.

The order of addition does not depend on the order of arrival, so equal inputs give equal bits. The owner adds up pieces of its
rows in the order in which the tiles arrive. A piece waits for one flag per rank, whose tiles cover the piece. The sum is stored
in the output, and with a replicated output in the `sums` of every other rank. After the last piece of a row of tiles, the flag of
that row is raised at every other rank. See docs/memory-model.md for why two slots suffice: each rank owns at least one row of
tiles, possibly of padding, so every call waits for every peer.

Addends are a bias [n], and a residual with the shape of the output. Both are added in float32 before the sum is rounded. With a
replicated output all ranks get the same rounded sum. Each rank adds its own bias and residual to it, and the result is rounded
again. Rows of padding stay zero. A call without addends compiles to a kernel without their arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.kernels.gemm_reduce_scatter.product import grouped, place_of, rounded, store_rows
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import NEXT_TILE, count, flag_address, signal, translate, wait
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

BIAS, RESIDUAL = 1, 2


@triton.jit
def with_addends(
    total, bias, residual, added, row, row_end, col, n, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """total + bias[col:] + residual[row:row_end, col:] for rows below `row_end`; the bits of `added` say which are present.

    `residual` has rows of n elements, a multiple of ALIGNED.
    """
    if added is not None:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        below = (r < row_end)[:, None]
        shared = tl.load(bias + c, mask=(c < n) & (added % 2 == 1), other=0.0).to(tl.float32)
        total += tl.where(below, shared[None, :], 0.0)
        size: tl.constexpr = residual.dtype.element_ty.primitive_bitwidth // 8
        at = tl.multiple_of(residual + r.to(tl.int64)[:, None] * n + c[None, :], (size, ALIGNED * size))
        total += tl.load(at, mask=below & (c < n)[None, :] & (added >= 2), other=0.0).to(tl.float32)
    return total


def addends(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Any, Any, Any]:
    """The kernel arguments (bias, residual, which), None if nothing is added. `out` stands for a missing one and is not read."""
    if bias is None and residual is None:
        return None, None, None
    which = BIAS * (bias is not None) + RESIDUAL * (residual is not None)
    return out if bias is None else bias, out if residual is None else residual, which


class Adding(Kernel[GemmReduceScatter]):
    """A kernel whose calls also take a bias and a residual: contiguous, aligned to 16 bytes, not in the output's memory."""

    ADDS = True
    """For callers that may not import this module: they test this attribute."""

    @abstractmethod
    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        """See Kernel.__call__."""


@triton.jit
def load_rows(matrix, row, row_end, col, n, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr):
    """matrix[row:row_end, col:n] of a row-major matrix with n columns, a multiple of ALIGNED; zero outside."""
    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    size: tl.constexpr = matrix.dtype.element_ty.primitive_bitwidth // 8
    at = tl.multiple_of(matrix + r.to(tl.int64)[:, None] * n + c[None, :], (size, ALIGNED * size))  # see `store_rows`
    return tl.load(at, mask=(r < row_end)[:, None] & (c < n)[None, :], other=0.0)


@triton.jit
def sum_of_ranks(
    box, slot, row, rows, col, n, room, bases, rank,
    WORLD: tl.constexpr, PULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The float32 sum over the ranks of a piece of this rank's rows."""
    total = tl.zeros([ROWS, COLS], tl.float32)
    for source in tl.static_range(WORLD):
        partial = box + place_of(slot, rank, source, room, n, WORLD, PULL)
        if PULL:
            partial = translate(partial, bases, rank, source)
        total += load_rows(partial, row, rows, col, n, ROWS, COLS, ALIGNED).to(tl.float32)
    return total


@triton.jit
def store_sum(
    total, out, bias, residual, added, sums, slot, row, col, m, n, rows, room, bases, rank,
    WORLD: tl.constexpr, REPLICATED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Stores a piece of this rank's rows, and if replicated also the plain sum in `sums` [slot, owner, room, n] of the others."""
    below = tl.minimum(rows, m - rank * rows)  # rows that are not padding
    if REPLICATED:
        own_sums = sums + place_of(slot, 0, rank, room, n, WORLD, False)
        for hop in tl.static_range(1, WORLD):
            theirs = translate(own_sums, bases, rank, (rank + hop) % WORLD)
            store_rows(theirs, total, row, rows, col, n, ROWS, COLS, ALIGNED, TARGET)
        if added is not None:
            first = (rank * rows).to(tl.int64) * n
            total = rounded(total, out.dtype.element_ty, TARGET).to(tl.float32)  # the value that the other ranks receive
            total = with_addends(total, bias, residual + first, added, row, below, col, n, ROWS, COLS, ALIGNED)
        store_rows(out + (rank * rows).to(tl.int64) * n, total, row, below, col, n, ROWS, COLS, ALIGNED, TARGET)
    else:
        total = with_addends(total, bias, residual, added, row, below, col, n, ROWS, COLS, ALIGNED)
        store_rows(out, total, row, rows, col, n, ROWS, COLS, ALIGNED, TARGET)


@triton.jit
def tell_sums(line, need, counts, raised, flags, bases, rank, epoch, most_lines, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """Counts a piece of a line of sums. With the `need`-th piece it raises the line's flag [source, most_lines] at all peers."""
    if count(counts + line, TARGET, "sys") == need - 1:
        tl.store(counts + line, 0)
        before = tl.atomic_xchg(raised + line, epoch, sem="relaxed", scope="gpu")
        for hop in tl.range(1, WORLD, num_stages=1):
            flag = flag_address(flags, rank * most_lines + line, bases, rank, (rank + hop) % WORLD)
            signal(flag, epoch - before, TARGET, "sys")


@triton.jit
def add_up(
    out, bias, residual, added, box, sums, counts, raised, flags, sum_flags, bases, control, rank, epoch, m, n, rows, room,
    WORLD: tl.constexpr, PULL: tl.constexpr, REPLICATED: tl.constexpr, TILES: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds up pieces, ROWS x COLS of a tile, until none is left. Programs take pieces from a counter."""
    m_tiles = tl.cdiv(rows, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    most_blocks = tl.cdiv(room, BLOCK_M)
    groups = tl.cdiv(n_tiles, TILES)
    slot = epoch & 1
    down: tl.constexpr = BLOCK_M // ROWS
    across: tl.constexpr = BLOCK_N // COLS
    count = m_tiles * n_tiles * down * across
    piece = tl.atomic_add(control + NEXT_TILE, 1, sem="relaxed", scope="gpu")
    while piece < count:
        place = grouped(piece // (down * across), m_tiles, n_tiles, GROUP_M)
        block = place // n_tiles
        tile = place % n_tiles
        row = block * BLOCK_M + piece % (down * across) // across * ROWS
        col = tile * BLOCK_N + piece % across * COLS
        if (row < rows) & (col < n):
            for hop in tl.range(1, WORLD + 1, num_stages=1):
                source = (rank + WORLD - hop) % WORLD
                index = (source * most_blocks + block) * groups + tile // TILES
                wait(flags + index, epoch, source, index, control, TARGET)
            total = sum_of_ranks(box, slot, row, rows, col, n, room, bases, rank, WORLD, PULL, ROWS, COLS, ALIGNED)
            store_sum(
                total, out, bias, residual, added, sums, slot, row, col, m, n, rows, room, bases, rank,
                WORLD, REPLICATED, ROWS, COLS, ALIGNED, TARGET,
            )  # fmt: skip
            if REPLICATED:
                need = tl.cdiv(tl.minimum(BLOCK_M, rows - block * BLOCK_M), ROWS) * tl.cdiv(n, COLS)
                tell_sums(block, need, counts, raised, sum_flags, bases, rank, epoch, most_blocks, WORLD, TARGET)
        piece = tl.atomic_add(control + NEXT_TILE, 1, sem="relaxed", scope="gpu")


@triton.jit
def receive_sums(
    out, bias, residual, added, sums, sum_flags, control, rank, epoch, slot, first, step, m, n, rows, room,
    WORLD: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Copies every step-th piece of the other ranks' sums to the output; it waits for the flag of its line of LINE rows."""
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(n, COLS)
    lines = tl.cdiv(room, LINE)
    for piece in tl.range(first, (WORLD - 1) * down * across, step, num_stages=1):
        source = (rank + WORLD - 1 - piece // (down * across)) % WORLD
        row = piece % (down * across) // across * ROWS
        col = piece % across * COLS
        index = source * lines + row // LINE
        wait(sum_flags + index, epoch, source, index, control, TARGET)
        arriving = sums + place_of(slot, 0, source, room, n, WORLD, False)
        block = load_rows(arriving, row, rows, col, n, ROWS, COLS, ALIGNED).to(tl.float32)
        first_element = (source * rows).to(tl.int64) * n
        below = tl.minimum(rows, m - source * rows)
        if added is not None:
            block = with_addends(block, bias, residual + first_element, added, row, below, col, n, ROWS, COLS, ALIGNED)
        store_rows(out + first_element, block, row, below, col, n, ROWS, COLS, ALIGNED, TARGET)
