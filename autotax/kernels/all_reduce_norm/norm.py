"""The common end of all variants: it computes the new residual, norm and quantisation from the sum of a row. Also the arguments
of a call.

The norm is computed from the new residual, which is the sum rounded to the dtype. vLLM's fused_add_rms_norm and FlashInfer's
all-reduce fusion do the same. So ranks that exchange sums exchange only the new residual. The norm is multiplied by the weight in
float32 and rounded once. An 8-bit output is quantised from that rounded y, so it equals the quantised 16-bit output bit by bit.
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
from autotax.kernels.quantise import GROUP, LARGEST, LEAST_BLOCK, LEAST_ROW_SCALE, e4m3
from autotax.operators.all_reduce_norm import EPS, AllReduceNorm


@triton.jit
def finish(
    total, weight, row, cols, hidden, below, first, end, eps, y, new_residual, scales,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Normalises rows of sums, float32 [rows, columns] with zeros past `hidden`, and stores their columns from `first` to `end`.

    `weight` is float32 [columns]; `row` and `cols` are row and column numbers. Rows from `below` on and columns from `hidden` on
    do not exist.
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
    """The base of all variants. Tensors of a call: x, weight, new residual, the residual and the scales if any, y."""

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
        """Enqueues the call. Any other tensor replaces a missing residual or missing scales; kernels do not read it."""
        raise NotImplementedError
