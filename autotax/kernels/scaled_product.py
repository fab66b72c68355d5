"""Quantisation to e4m3, and products of e4m3 matrices with scales: of Triton, of the vendor's library, and on CPU ranks.

Quantisation follows vLLM. A row's scale is its largest magnitude / 448, at least 1 / (448 * 512); values are multiplied by its
inverse. A group of 128 columns has its largest magnitude, at least 1e-10, / 448; values are divided by it. With one scale for the
tensor, values are multiplied by its inverse. A row or group with an infinity or a NaN becomes NaN.

C = (A @ B.T) with the scales of `operators/scaled.py`. Tensor cores add products of e4m3 with fewer bits than float32 has. So the
sums of each strip of K, 128 or 256 columns, are added up in float32, and nothing relies on fast accumulation. With scales `block`
a strip has 128 columns, and its sum is scaled first. The other scales are applied to the whole sum.

The parameter `product` names a product. `library` is the vendor's. `64x128x4x4` is Triton's: rows and columns of a tile, stages,
warps. `64x128x2x4x2` has strips of 256 columns, so that a program waits for tensor cores half as often.
`roles-64x128x8x4x2` is that of `specialized_product`. `splits` are its parts along K; the program that finishes a tile's last part adds up all parts in their order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.gemm import load_tile
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.product import grouped, last_of_parts, part_of_tile, rounded
from autotax.kernels.tiling import ROLES, ProductTile
from autotax.operators.scaled import library_product

GROUP = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)
LEAST_ROW_SCALE = tl.constexpr(1 / (448 * 512))
LEAST_BLOCK = tl.constexpr(1e-10)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def e4m3(value, TARGET: tl.constexpr):
    """Rounds to the bits of the nearest e4m3, ties to even, saturating at 448; NaN stays NaN."""
    if TARGET == "cuda":
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the instruction saturates
    else:  # noqa: RET505 - decided when compiled
        size = tl.minimum(tl.abs(value), LARGEST)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 neighbouring e4m3 numbers are 2^-9 apart, like neighbouring float32 numbers above 2^14.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(value == value, code, 0x7F)
        return (code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def divided(values, divisors, TARGET: tl.constexpr):
    """values [rows, columns] / divisors [rows] with the bits of a division of float32: one division a row, four FMA a value.

    The second quotient is less than one unit in the last place off, and the third is then right: P. Markstein, "Computation of
    elementary functions on the IBM RISC System/6000 processor", 1990. Quotients of values below 2^-100 may be off, but they are
    zero in e4m3, since no scale of a block is below 2^-43.
    """
    if TARGET == "interpreter":  # its FMA rounds twice
        return tl.div_rn(values, tl.broadcast_to(divisors[:, None], values.shape))
    else:  # noqa: RET505 - decided when compiled
        inverse = tl.broadcast_to(tl.div_rn(tl.full(divisors.shape, 1.0, tl.float32), divisors)[:, None], values.shape)
        # Finite, for zero times infinity is no number. The remainder is subtracted, for -0 plus +0 is +0.
        finite = tl.broadcast_to(tl.minimum(divisors, LARGEST_FLOAT)[:, None], values.shape)
        quotient = values * inverse
        for _ in tl.static_range(2):
            quotient = tl.fma(tl.fma(quotient, finite, -values), -inverse, quotient)
        return quotient


@triton.jit
def quantise(values, scale, most, QUANT: tl.constexpr, TARGET: tl.constexpr):
    """Quantises whole rows, or with QUANT "block" groups of 128 numbers: the bits of e4m3, uint8 in the shape of `values`, and
    the scale of each row or group.

    `values` are float32 [rows or groups, columns], zero where there is none. QUANT "tensor" takes the given `scale` and makes
    none. With QUANT "row" no scale follows a magnitude above `most`.
    """
    if QUANT == "tensor":
        codes = e4m3(values * tl.div_rn(1.0, scale), TARGET)
        scales = scale
    elif QUANT == "row":
        largest = tl.minimum(tl.max(tl.abs(values), 1), most)
        scales = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), LEAST_ROW_SCALE)
        codes = e4m3(values * tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)[:, None], TARGET)
    else:
        largest = tl.maximum(tl.max(tl.abs(values), 1), LEAST_BLOCK)
        scales = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
        codes = e4m3(divided(values, scales, TARGET), TARGET)
    return codes, scales


BLOCK_K = tl.constexpr(128)
"""Columns of K that share a scale with scales `block`."""
LIBRARY, FAST = "library", "library_fast"
"""The vendor's product. FAST accumulates with fewer bits: of exact problems only comparisons measure it."""


@triton.jit
def numbers_of(codes):
    """The float32 numbers of e4m3 or e5m2 codes, by their bits: the interpreter's own conversion has no NaN."""
    bits = codes.to(tl.uint8, bitcast=True).to(tl.int32)
    if codes.dtype == tl.float8e5:  # the upper half of float16
        return (bits << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # noqa: RET505 - decided at compile time
        size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
        return tl.where(bits >= 0x80, -size, size)


@triton.jit
def dot_of_codes(x, y, TARGET: tl.constexpr):
    """x @ y in float32 for e4m3 operands. The interpreter gets float32 operands."""
    if TARGET == "interpreter":
        return tl.dot(numbers_of(x), numbers_of(y), input_precision="ieee")
    else:  # noqa: RET505 - decided at compile time
        return tl.dot(x, y)


@triton.constexpr_function
def turned(block_m, block_n, target):
    """Whether a tile is computed transposed: Hopper takes 64 rows of e4m3 or more, else the compiler converts every element."""
    return target == "cuda" and block_m < 64 and block_n >= 64


@triton.jit
def scaled_step(
    acc, x, scales_a, row, row_end, stride_m, stride_g, b, scales_b, col, n, at, k,
    SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc + x @ B[col:, at : at + STRIP].T, with scales `block` times the scales of both; its transpose where `turned`.

    The scale of row r of A and group g lies at scales_a + r * stride_m + g * stride_g.
    """
    y = load_tile(b, col, at, n, k, k, BLOCK_N, STRIP, TMA, ALIGNED)
    TURNED: tl.constexpr = turned(BLOCK_M, BLOCK_N, TARGET)
    part = dot_of_codes(y, x.T, TARGET) if TURNED else dot_of_codes(x, y.T, TARGET)
    if SCALES == "block":
        group = at // BLOCK_K
        r = row + tl.arange(0, BLOCK_M)
        of_a = tl.load(scales_a + r.to(tl.int64) * stride_m + group * stride_g, mask=r < row_end, other=0.0)
        groups = tl.cdiv(k, BLOCK_K)
        if BLOCK_N <= BLOCK_K:  # the tile's columns share a scale
            of_both = of_a * tl.load(scales_b + col // BLOCK_K * groups + group)
            part = part * (of_both[None, :] if TURNED else of_both[:, None])
        else:
            c = col + tl.arange(0, BLOCK_N)
            of_b = tl.load(scales_b + c // BLOCK_K * groups + group, mask=c < n, other=0.0)
            part = part * of_a[None, :] * of_b[:, None] if TURNED else part * of_a[:, None] * of_b[None, :]
    return acc + part


@triton.jit
def scaled_sum(
    a, scales_a, row, row_end, stride_m, stride_g, b, scales_b, col, n, start, end, k,
    SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """A[row:row_end, start:end] @ B[col:, start:end].T in float32, for A with rows of k elements; see `scaled_step`."""
    TURNED: tl.constexpr = turned(BLOCK_M, BLOCK_N, TARGET)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if TURNED else [BLOCK_M, BLOCK_N], tl.float32)
    for at in range(start, end, STRIP):
        x = load_tile(a, row, at, row_end, k, k, BLOCK_M, STRIP, TMA, ALIGNED)
        acc = scaled_step(
            acc, x, scales_a, row, row_end, stride_m, stride_g, b, scales_b, col, n, at, k,
            SCALES, BLOCK_M, BLOCK_N, STRIP, TMA, ALIGNED, TARGET,
        )  # fmt: skip
    return tl.trans(acc) if TURNED else acc


@triton.jit
def with_scales(
    acc, scales_a, row, row_end, stride_m, scales_b, col, n, SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """A whole sum times the scales of a tensor or of rows. With scales `block` it has them already."""
    if SCALES == "tensor":
        acc = acc * (tl.load(scales_a) * tl.load(scales_b))
    if SCALES == "row":
        r = row + tl.arange(0, BLOCK_M)
        c = col + tl.arange(0, BLOCK_N)
        of_a = tl.load(scales_a + r * stride_m, mask=r < row_end, other=0.0)
        of_b = tl.load(scales_b + c, mask=c < n, other=0.0)
        acc = acc * of_a[:, None] * of_b[None, :]
    return acc


@triton.jit
def store_product(out, acc, row, row_end, col, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TARGET: tl.constexpr):
    """Stores rows below `row_end` of a tile of C [., n] in the type of C."""
    r = row + tl.arange(0, BLOCK_M)
    c = col + tl.arange(0, BLOCK_N)
    inside = (r < row_end)[:, None] & (c < n)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * n + c[None, :], rounded(acc, out.dtype.element_ty, TARGET), mask=inside)


@triton.jit
def scaled_item(
    item, a, scales_a, stride_m, stride_g, b, scales_b, out, partials, finished, m, n, k,
    SCALES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Computes the item-th of SPLITS parts of each tile, and stores the tile with its last part."""
    m_tiles = tl.cdiv(m, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    at = grouped(item // SPLITS, m_tiles, n_tiles, 8)
    row = at // n_tiles * BLOCK_M
    col = at % n_tiles * BLOCK_N
    start, end = 0, k
    if SPLITS > 1:
        blocks = tl.cdiv(k, STRIP)
        start = item % SPLITS * blocks // SPLITS * STRIP
        end = tl.minimum((item % SPLITS + 1) * blocks // SPLITS * STRIP, k)
    acc = scaled_sum(
        a, scales_a, row, m, stride_m, stride_g, b, scales_b, col, n, start, end, k, SCALES, BLOCK_M, BLOCK_N, STRIP, TMA, ALIGNED, TARGET
    )
    if SPLITS == 1:
        acc = with_scales(acc, scales_a, row, m, stride_m, scales_b, col, n, SCALES, BLOCK_M, BLOCK_N)
        store_product(out, acc, row, m, col, n, BLOCK_M, BLOCK_N, TARGET)
    else:
        tile = item // SPLITS
        if last_of_parts(acc, partials, finished, tile, item % SPLITS, SPLITS, BLOCK_M, BLOCK_N, TARGET):
            parts = partials + tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N
            acc = part_of_tile(parts, 0, SPLITS, BLOCK_M, BLOCK_M, BLOCK_N)
            acc = with_scales(acc, scales_a, row, m, stride_m, scales_b, col, n, SCALES, BLOCK_M, BLOCK_N)
            store_product(out, acc, row, m, col, n, BLOCK_M, BLOCK_N, TARGET)


@triton.jit(do_not_specialize=["m"])
def scaled_product_kernel(
    a, scales_a, stride_m, stride_g, b, scales_b, out, partials, finished, m, n, k,
    SCALES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """One program for each part of a tile."""
    scaled_item(
        tl.program_id(0), a, scales_a, stride_m, stride_g, b, scales_b, out, partials, finished, m, n, k,
        SCALES, SPLITS, BLOCK_M, BLOCK_N, STRIP, TMA, ALIGNED, TARGET,
    )  # fmt: skip


class Tile:
    """A tile of Triton's product, as a config names it."""

    def __init__(self, config: Config, context: Context) -> None:
        self.rows, self.columns, self.stages, self.warps, strips = ProductTile.of(config["product"])
        self.strip = BLOCK_K.value * strips
        self.splits = config["splits"]
        self.tma = context.hardware.backend != "rocm"

    def view(self, matrix: Tensor, rows: int) -> Any:
        """The argument of `load_tile` for blocks of `rows` rows: a TMA descriptor, or the tensor itself."""
        return TensorDescriptor.from_tensor(matrix, [rows, self.strip]) if self.tma else matrix

    def items(self, m: int, n: int) -> int:
        """Parts of all tiles."""
        return ceil_div(m, self.rows) * ceil_div(n, self.columns) * self.splits

    def constants(self, problem: Any) -> dict[str, Any]:
        """Constants of a kernel that calls `scaled_item`, and compile options."""
        return {
            "SCALES": problem.scales, "SPLITS": self.splits, "BLOCK_M": self.rows, "BLOCK_N": self.columns, "STRIP": self.strip,
            "TMA": self.tma, "ALIGNED": math.gcd(problem.k, 16), "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip

    def parts(self, m: int, n: int, context: Context) -> tuple[Tensor, Tensor]:
        """`partials` and `finished` for m rows or fewer."""
        items = self.items(m, n) if self.splits > 1 else 1
        finished = context.empty((items // self.splits if self.splits > 1 else 1,), torch.int32).zero_()
        return context.empty((items, self.rows, self.columns), torch.float32), finished


SCALE_BYTES = 16
"""The library takes scales that begin at a multiple of this."""


class ScaledProduct:
    """The product of a config, with its workspaces for `rows` rows of A or fewer."""

    def __init__(self, problem: Any, config: Config, rows: int, context: Context) -> None:
        self.problem, self.context = problem, context
        name = config["product"]
        self.fast = name == FAST or problem.accumulate == "fast"
        self.tile, self.specialized = None, None
        if name.startswith(ROLES):
            from autotax.kernels.specialized_product import SpecializedProduct  # needs Triton's modules for NVIDIA

            self.specialized = SpecializedProduct(ProductTile.of(name), config["splits"], problem, rows, context)
        elif name not in (LIBRARY, FAST):
            self.tile = Tile(config, context)
            self.partials, self.finished = self.tile.parts(rows, problem.n, context)
        elif problem.scales != "tensor":
            groups = ceil_div(problem.k, BLOCK_K.value) if problem.scales == "block" else 1
            self.packed = context.empty((groups * rows,), torch.float32)

    def __call__(self, a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """out [m, n] = A [m, k] @ B [n, k].T, for A and B with their scales."""
        if not len(a):
            return
        if self.specialized:
            self.specialized(a, scales_a, b, scales_b, out)
        elif self.tile:
            self._by_tiles(self.tile, a, scales_a, b, scales_b, out)
        elif not self.context.dry:
            self._by_library(a, scales_a, b, scales_b, out)

    def _by_tiles(self, tile: Tile, a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        m, n = len(a), self.problem.n
        strides = scales_a.stride() if scales_a.dim() == 2 else (0, 0)
        self.context.launch(
            scaled_product_kernel, (tile.items(m, n),),
            tile.view(a, tile.rows), scales_a, *strides, tile.view(b, tile.columns), scales_b, out, self.partials, self.finished,
            m, n, self.problem.k, **tile.constants(self.problem),
        )  # fmt: skip

    def _by_library(self, a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        layout = self.problem.scales
        if layout == "block" and a.is_cuda and scales_a.stride() != (1, len(a)):  # some rows of a larger A
            packed = self.packed[: scales_a.numel()].view(-1, len(a))
            packed.copy_(scales_a.t())
            scales_a = packed.t()
        elif layout == "row" and a.is_cuda and scales_a.data_ptr() % SCALE_BYTES:
            scales_a = self.packed[: len(a)].view(-1, 1).copy_(scales_a)
        library_product(a, scales_a, b, scales_b, layout, out, fast=self.fast)
