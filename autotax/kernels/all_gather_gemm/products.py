"""Computes a tile of C as one product, or as two products side by side.

If the number of columns is no power of two (320), two products (256 and 64 wide) share the rows of A. Accumulators
and views of B are tuples of one or two items. Such tiles can fill one wave of processors where narrower tiles would
need two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.kernels.all_gather_gemm.tiles import TileOptions
from autotax.kernels.primitives import dot


@triton.constexpr_function
def wide(block_n):
    """Columns of a tile's first product: the largest power of two."""
    return 1 << (block_n.bit_length() - 1)


@triton.constexpr_function
def narrow(block_n):
    """Columns of a tile's second product: a power of two, or zero. Few tiles have a second product."""
    return block_n - (1 << (block_n.bit_length() - 1))


def views_of_b(tiles: TileOptions, matrix: Tensor) -> tuple[Any, Any]:
    """Returns the views of B for the first and second product of a tile. The second is None if there is none. The
    kernel takes them as two arguments, because a launch accepts no TMA descriptor inside a tuple.
    """
    if tiles.block_n & (tiles.block_n - 1) == 0:  # fast path for eager calls
        return tiles.view_b(matrix), None
    first, second = (replace(tiles, block_n=part(tiles.block_n)).view_b(matrix) for part in (wide, narrow))
    return first, second


@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The accumulators of a tile."""
    first = tl.zeros([BLOCK_M, wide(BLOCK_N)], tl.float32)
    if narrow(BLOCK_N) == 0:
        return (first,)
    else:  # noqa: RET505 - decided at compile time; without `else` both arms would be compiled
        return first, tl.zeros([BLOCK_M, narrow(BLOCK_N)], tl.float32)


@triton.jit
def load_tile(
    view, row, col, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Loads ROWS x COLS elements of a row-major matrix, zero outside. `view` is a TMA descriptor of such blocks, or a
    pointer. Columns and strides are multiples of ALIGNED elements.
    """
    if TMA:
        tile = view.load([row, col])
    else:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        size: tl.constexpr = view.dtype.element_ty.primitive_bitwidth // 8
        # The compiler knows no alignment of an address translated from an integer: loads would be two bytes wide.
        there = tl.multiple_of(view + r.to(tl.int64)[:, None] * stride + c[None, :], (size, ALIGNED * size))
        tile = tl.load(there, mask=inside, other=0.0)
    return tile


@triton.jit
def multiplied(
    acc, x, b, col, at, n, end, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc + x @ B[col : col + BLOCK_N, at : at + BLOCK_K].T for B [n, k]; columns from `end` on count as zero."""
    y = load_tile(b[0], col, at, n, end, k, wide(BLOCK_N), BLOCK_K, TMA, ALIGNED)
    first = dot(x, y.T, acc[0], TARGET)
    if narrow(BLOCK_N) == 0:
        return (first,)
    else:  # noqa: RET505 - as above
        z = load_tile(b[1], col + wide(BLOCK_N), at, n, end, k, narrow(BLOCK_N), BLOCK_K, TMA, ALIGNED)
        return first, dot(x, z.T, acc[1], TARGET)


@triton.jit
def store_block(out, acc, row, col, row_end, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    r = row + tl.arange(0, BLOCK_M)
    c = col + tl.arange(0, BLOCK_N)
    inside = (r < row_end)[:, None] & (c < n)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * n + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(out, acc, row, col, row_end, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    store_block(out, acc[0], row, col, row_end, n, BLOCK_M, wide(BLOCK_N))
    if narrow(BLOCK_N) != 0:
        store_block(out, acc[1], row, col + wide(BLOCK_N), row_end, n, BLOCK_M, narrow(BLOCK_N))
