"""The common end of all variants: it computes the new residual, norm and quantisation from the sum of a row. Also the arguments
of a call, and the baseline `bsp`.

The norm is computed from the new residual, which is the sum rounded to the dtype. vLLM's fused_add_rms_norm and FlashInfer's
all-reduce fusion do the same. So ranks that exchange sums exchange only the new residual. The norm is multiplied by the weight in
float32 and rounded once. An 8-bit output is quantised from that rounded y, so it equals the quantised 16-bit output bit by bit.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.bsp import all_reduce
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.kernel import Kernel
from autotax.kernels.scaled_product import GROUP, LARGEST, LEAST_BLOCK, LEAST_ROW_SCALE, e4m3
from autotax.operators.all_reduce_norm import EPS, AllReduceNorm


@triton.jit
def inverse(value):
    return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)


@triton.jit
def given_factor(scales, QUANT: tl.constexpr):
    """The factor of codes with quant `tensor`. Kernels load it before they wait; for other quantisations it is not used."""
    if QUANT == "tensor":
        return tl.div_rn(1.0, tl.load(scales))
    else:  # noqa: RET505 - decided when compiled
        return 1.0


@triton.jit
def quotients(parts, scale, TARGET: tl.constexpr):
    """parts / scale, float32 [rows, groups, columns] / [rows, groups], rounded as by a division.

    A division of each element takes about ten instructions. The rest of a quotient by the inverse corrects it to the nearest
    number. The interpreter rounds within `fma`, so it divides.
    """
    if TARGET == "interpreter":
        return tl.div_rn(parts, tl.broadcast_to(scale[:, :, None], parts.shape))
    else:  # noqa: RET505 - decided when compiled
        by = inverse(scale)[:, :, None]
        near = parts * by
        finite = tl.minimum(scale, 1e38)[:, :, None]  # zero times infinity would be NaN
        rest = tl.fma(-near, tl.broadcast_to(finite, parts.shape), parts)
        return tl.fma(rest, tl.broadcast_to(by, parts.shape), near)


@triton.jit
def magnitudes(values, TARGET: tl.constexpr):
    """The magnitudes of which the largest makes a scale; a NaN has none. The maximum of GPUs passes a NaN over by itself."""
    if TARGET == "interpreter":
        values = tl.where(values == values, values, 0.0)
    return tl.abs(values)


@triton.jit
def factor_of(total, hidden, eps):
    """The factor of each row of the new residual, float32 [rows, columns] with zeros past `hidden`."""
    return tl.rsqrt(tl.sum(total * total, 1) / hidden + eps)


@triton.jit
def scale_of_row(total, factor, weight, OFFSET: tl.constexpr, TYPE: tl.constexpr, TARGET: tl.constexpr):
    """The scale of each row with quant `row`. Rounding keeps order, so only the largest magnitude is rounded to TYPE."""
    largest = tl.max(magnitudes(total * factor[:, None] * (weight + OFFSET)[None, :], TARGET), 1)
    largest = rounded(largest, TYPE, TARGET).to(tl.float32)
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), LEAST_ROW_SCALE)


@triton.jit
def store_normed(
    short, factor, scale, static_factor, weight, row, begin, hidden, below, end, y, new_residual, scales,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, TARGET: tl.constexpr, KEPT: tl.constexpr = True,
):  # fmt: skip
    """Stores the new residual `short` [rows, columns], its norm and the scales, for columns from `begin` to `end`; see `finish`.

    KEPT: store the new residual. `begin` is a multiple of GROUP. `scale` [rows] is used with quant `row` only, `static_factor`
    with quant `tensor` only.
    """
    total = short.to(tl.float32)
    cols = begin + tl.arange(0, total.shape[1])
    normed = rounded(total * factor[:, None] * (weight + OFFSET)[None, :], short.dtype, TARGET)
    inside = (row < below)[:, None] & (cols < end)[None, :]
    at = row.to(tl.int64)[:, None] * hidden + cols[None, :]
    if KEPT:
        tl.store(new_residual + at, short, mask=inside)
    if QUANT == "none":
        tl.store(y + at, normed, mask=inside)
    else:
        held = normed.to(tl.float32)
        if QUANT == "tensor":
            codes = held * static_factor
        elif QUANT == "row":
            if begin == 0:
                tl.store(scales + row, scale, mask=row < below)
            codes = held * inverse(scale)[:, None]
        else:
            ROWS: tl.constexpr = total.shape[0]
            GROUPS: tl.constexpr = total.shape[1] // GROUP
            parts = tl.reshape(held, [ROWS, GROUPS, GROUP])
            largest = tl.maximum(tl.max(magnitudes(parts, TARGET), 2), LEAST_BLOCK)
            of_group = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
            group = begin // GROUP + tl.arange(0, GROUPS)
            within = (row < below)[:, None] & (group * GROUP < end)[None, :]
            tl.store(scales + row.to(tl.int64)[:, None] * (hidden // GROUP) + group[None, :], of_group, mask=within)
            codes = tl.reshape(quotients(parts, of_group, TARGET), total.shape)
        tl.store(y + at, e4m3(codes, TARGET), mask=inside)


@triton.jit
def finish(
    total, static_factor, weight, row, hidden, below, eps, y, new_residual, scales,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, TARGET: tl.constexpr, KEPT: tl.constexpr = True,
):  # fmt: skip
    """Normalises whole rows of sums, float32 [rows, columns] with zeros past `hidden`, and stores them.

    `static_factor` is that of `given_factor`, `weight` is float32 [columns], `row` are row numbers. Rows from `below` on and
    columns from `hidden` on do not exist.
    """
    TYPE: tl.constexpr = new_residual.dtype.element_ty
    short = rounded(total, TYPE, TARGET)
    factor = factor_of(short.to(tl.float32), hidden, eps)
    scale = factor
    if QUANT == "row":
        scale = scale_of_row(short.to(tl.float32), factor, weight, OFFSET, TYPE, TARGET)
    store_normed(
        short, factor, scale, static_factor, weight, row, 0, hidden, below, hidden, y, new_residual, scales, OFFSET, QUANT, TARGET, KEPT
    )


class NormKernel(Kernel[AllReduceNorm]):
    """The base of all variants. Tensors of a call: x, weight, new residual, the residual and the scales if any, y.

    With a product in front, the operands a and b are given instead of x.
    """

    products: Tensor
    """The stored product, [m, hidden]."""

    @property
    def in_place(self) -> bool:
        """Whether y may be x, and the new residual the residual: a program reads its rows before it stores them."""
        return self.config.values.get("split", 1) == 1

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        columns = power_of_two(problem.hidden)
        self.constants: dict[str, Any] = {
            "COLS": columns, "OFFSET": problem.offset, "QUANT": problem.quant, "ADDED": problem.residual == "added",
            "num_warps": config.values.get("num_warps", 8),
        }  # fmt: skip
        if problem.k:
            self.products = self.unnormed(problem)

    def unnormed(self, problem: AllReduceNorm) -> Tensor:
        """Allocates memory for rows before their norm, [m, hidden]."""
        return self.context.empty((problem.m, problem.hidden), self.context.dtype(problem))

    def addend(self, a: Tensor, b: Tensor) -> Any:
        """The x of `run` for a problem with a product."""
        x = self.products[: len(a)]
        self.context.matmul(a, b, x)
        return x

    def __call__(self, x: Tensor, *others: Tensor, eps: float = EPS) -> None:
        """Enqueues a call; `others`: see NormKernel, in that order."""
        if self.problem.k:
            x, others = self.addend(x, others[0]), others[1:]
        weight, new_residual, *rest, y = others
        residual = rest.pop(0) if self.problem.residual == "added" else new_residual
        scales = rest[0] if rest else y
        self.run(x, residual, weight, new_residual, y if self.problem.quant == "none" else y.view(torch.uint8), scales, eps)

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """Enqueues the call. Any other tensor replaces a missing residual or missing scales; kernels do not read it."""
        raise NotImplementedError


@triton.jit(do_not_specialize=["m", "eps"])
def norm_kernel(
    x, residual, weight, new_residual, y, scales, m, eps,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, TARGET: tl.constexpr, KEPT: tl.constexpr = True,
):  # fmt: skip
    """Each program handles ROWS rows of x, the sum over the ranks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inside = (row < m)[:, None] & (cols < HIDDEN)[None, :]
    at = row.to(tl.int64)[:, None] * HIDDEN + cols[None, :]
    total = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if ADDED:
        total += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(weight + cols, mask=cols < HIDDEN, other=0).to(tl.float32)
    finish(total, given_factor(scales, QUANT), scale, row, HIDDEN, m, eps, y, new_residual, scales, OFFSET, QUANT, TARGET, KEPT)


class AfterSum(NormKernel):
    """A variant that runs the norm kernel after something else has computed the sum over the ranks."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.rows = int(config.values.get("rows", 1))
        self.constants |= {"ROWS": self.rows, "HIDDEN": problem.hidden}
        self.sums = self.room(problem)

    def room(self, problem: AllReduceNorm) -> Tensor:
        """The memory of the sum, [m, hidden]. A product is stored there at once."""
        return self.products if problem.k else self.unnormed(problem)

    @abstractmethod
    def compute_sums(self, x: Tensor) -> None:
        """Enqueues the sum over the ranks of x, or of the product that is stored already, into `sums`."""

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        self.compute_sums(x)
        m, tensors = self.problem.m, (self.sums, residual, weight, new_residual, y, scales)
        self.context.launch(norm_kernel, (ceil_div(m, self.rows),), *tensors, m, eps, **self.constants)

    def alone(self, total: Tensor, weight: Tensor, *rest: Tensor, eps: float) -> None:
        """Norms rows that are sums already; `rest`: the scales if there are any, y."""
        *scales, y = rest
        y = y if self.problem.quant == "none" else y.view(torch.uint8)
        last = scales[0] if scales else y
        arguments = total, total, weight, total, y, last, len(total), eps
        constants = self.constants | {"ADDED": False, "KEPT": False}
        self.context.launch(norm_kernel, (ceil_div(len(total), self.rows),), *arguments, **constants)

    def changes_for(self, smaller: AllReduceNorm) -> dict[str, Any] | None:
        """Any number of rows: the sum is computed with the sizes of the call."""
        return {"sums": self.sums[: smaller.m]}


class Bsp(AfterSum):
    """The bulk-synchronous baseline: the collective library's all-reduce, then the norm kernel."""

    def compute_sums(self, x: Tensor) -> None:
        if not self.problem.k:
            self.context.copy(self.sums, x)
        all_reduce(self.context, self.sums)
