"""The common end of all variants: from the sum of a row its new residual, norm and quantisation. And the arguments of a call.

The norm is computed from the new residual, the sum as it is rounded to the type, as vLLM's fused_add_rms_norm and FlashInfer's
all-reduce fusion do. So ranks that exchange sums need not exchange more than the new residual. The norm is multiplied by the weight
in float32 and rounded once. An output of 8 bits is quantised from that rounded y: it has the bits that a quantiser makes of the
output of 16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.kernel import Kernel
from autotax.operators.all_reduce_norm import EPS, AllReduceNorm

GROUP = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)
LEAST_ROW_SCALE = tl.constexpr(1 / (448 * 512))
LEAST_BLOCK = tl.constexpr(1e-10)


@triton.jit
def e4m3(value, TARGET: tl.constexpr):
    """The bits of the nearest e4m3, ties to even, at most 448 in magnitude; NaN for NaN."""
    if TARGET == "cuda":
        held = tl.where(value == value, tl.minimum(tl.maximum(value, -LARGEST), LARGEST), value)
        return held.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:  # noqa: RET505 - decided when compiled
        size = tl.minimum(tl.abs(value), LARGEST)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 neighbours are 2^-9 apart, as those of a float32 above 2^14 are.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(value == value, code, 0x7F)
        return (code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def finish(
    total, weight, row, cols, hidden, below, first, end, eps, y, new_residual, scales,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Norms rows of sums, float32 [rows, columns] with zeros behind `hidden`, and stores their columns from `first` to `end`.

    `weight` is float32 [columns]; `row` and `cols` are the numbers of rows and columns; those from `below` and `hidden` on are
    not there.
    """
    TYPE: tl.constexpr = new_residual.dtype.element_ty
    short = rounded(total, TYPE, TARGET)
    total = short.to(tl.float32)
    mean = tl.sum(total * total, 1) / hidden
    factor = tl.rsqrt(mean + eps)
    normed = rounded(total * factor[:, None] * (weight + OFFSET)[None, :], TYPE, TARGET)
    inside = (row < below)[:, None] & ((cols >= first) & (cols < end))[None, :]
    at = row.to(tl.int64)[:, None] * hidden + cols[None, :]
    tl.store(new_residual + at, short, mask=inside)
    if QUANT == "none":
        tl.store(y + at, normed, mask=inside)
    else:
        held = normed.to(tl.float32)
        if QUANT == "tensor":
            codes = held * tl.div_rn(1.0, tl.load(scales))
        elif QUANT == "row":
            largest = tl.max(tl.abs(held), 1)
            scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), LEAST_ROW_SCALE)
            if first == 0:
                tl.store(scales + row, scale, mask=row < below)
            codes = held * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
        else:
            ROWS: tl.constexpr = total.shape[0]
            GROUPS: tl.constexpr = total.shape[1] // GROUP
            parts = tl.reshape(held, [ROWS, GROUPS, GROUP])
            largest = tl.maximum(tl.max(tl.abs(parts), 2), LEAST_BLOCK)
            scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
            group = tl.arange(0, GROUPS)
            within = (row < below)[:, None] & ((group * GROUP >= first) & (group * GROUP < end))[None, :]
            tl.store(scales + row.to(tl.int64)[:, None] * (hidden // GROUP) + group[None, :], scale, mask=within)
            codes = tl.reshape(tl.div_rn(parts, tl.broadcast_to(scale[:, :, None], parts.shape)), total.shape)
        tl.store(y + at, e4m3(codes, TARGET), mask=inside)


class NormKernel(Kernel[AllReduceNorm]):
    """The base of all variants. The tensors of a call: x, weight, new residual, the residual and the scales if any, y."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        columns = power_of_two(problem.hidden)
        self.constants: dict[str, Any] = {
            "COLS": columns,
            "OFFSET": problem.offset,
            "QUANT": problem.quant,
            "ADDED": problem.residual == "added",
            "num_warps": config.values.get("num_warps", 8),
        }

    def __call__(self, x: Tensor, weight: Tensor, new_residual: Tensor, *more: Tensor, eps: float = EPS) -> None:
        """Enqueues a call; `more`: the residual if there is one, the scales if there are any, y."""
        *rest, y = more
        residual = rest.pop(0) if self.problem.residual == "added" else x
        scales = rest[0] if rest else y
        self.run(x, residual, weight, new_residual, y if self.problem.quant == "none" else y.view(torch.uint8), scales, eps)

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """Enqueues the call. Another tensor stands in the place of a missing residual or missing scales; kernels do not read it."""
        raise NotImplementedError
