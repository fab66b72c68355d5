"""A row-parallel product, its sum over the ranks, the residual and RMSNorm in one kernel, which may also quantise.

Torch has no such operator, and a caller that gets None runs these one after another. Serving engines call it: see
`autotax.engines.norms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.nn.consensus import DTYPES
from autotax.operators import registry
from autotax.operators.inputs import EIGHT_BITS
from autotax.operators.problems import AllReduceNorm
from autotax.operators.scaled import SCALES_OF
from autotax.torch.plans import Call, NotTaken, plan_of
from autotax.torch.symm_mem import aligned, ready

NORMED = "fused_matmul_all_reduce_norm"


class RmsNorm(NamedTuple):
    """A norm: its weight [n], the epsilon of the mean square, and 1 where the weight is stored as its difference from 1.

    Its result is quantised as the `quant` of AllReduceNorm says; quant tensor takes the `scale`, float32 [1].
    """

    weight: Tensor
    eps: float
    offset: int = 0
    quant: str = "none"
    scale: Tensor | None = None


@dataclass(frozen=True)
class NormedCall(Call):
    """One kind of call of `matmul_all_reduce_norm`."""

    problem: AllReduceNorm

    @classmethod
    def of(cls, a: Tensor, n: int, quantize: str, norm: RmsNorm, ranks: int) -> NormedCall:
        if a.dtype not in DTYPES or not a.numel():
            raise NotTaken(f"A is {a.dtype} {list(a.shape)}; kernels take {', '.join(DTYPES.values())}")
        (rows, k), front = a.shape, (SCALES_OF[quantize], quantize) if quantize else ()
        try:
            return cls(AllReduceNorm(rows, n, DTYPES[a.dtype], ranks, "added", norm.quant, norm.offset, k, *front))
        except UsageError as error:
            raise NotTaken(str(error)) from None

    def require(self, kernel: Any) -> None:
        if kernel.config.variant == registry.of(self.problem).baseline:
            raise NotTaken("a product, a sum and a norm one after another are the fastest")

    def run(
        self, kernel: Any, a: Tensor, b: Tensor, scales: tuple[Tensor, ...], residual: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, ...]:
        y, total = a.new_empty(residual.shape, dtype=EIGHT_BITS.get(self.problem.out_dtype)), a.new_empty(residual.shape)
        made = (a.new_empty(len(a), dtype=torch.float32),) if norm.quant == "row" else ()
        of_y = made if norm.scale is None else (norm.scale,)
        kernel(ready(a), aligned(b), *scales, aligned(norm.weight), total, ready(residual), *of_y, y, eps=norm.eps)
        return y, total, *made


def matmul_all_reduce_norm(
    a: Tensor, b: Tensor, scales: tuple[Tensor, ...], quantize: str, residual: Tensor, norm: RmsNorm, group_name: str
) -> tuple[Tensor, ...] | None:
    """y and the new residual S. S is the sum over the ranks of a @ b.t(), + residual; y is its norm. None without a kernel.

    With quant row the scales of y follow, float32 [m]. Other quantisations that make scales have no kernel here.
    Collective at the first call of a kind, except during a graph capture.

    Args:
        a: [m, k], bf16, fp16 or fp32.
        b: [n, k], contiguous. Of the dtype of a, or e4m3.
        scales: The scale of a, float32 [1], if `quantize` is static. Then those of b in e4m3.
        quantize: row, block or static for b in e4m3. Else empty.
        residual: [m, n], of the dtype of a, the same on all ranks.
        norm: Its weight has the dtype of a.
        group_name: The process group.
    """
    if norm.quant not in ("none", "tensor", "row") or a.dim() != 2 or residual.shape != (len(a), len(b)):
        return None
    if not a.dtype == residual.dtype == norm.weight.dtype:
        return None
    key = NORMED, a.shape, a.dtype, b.shape, quantize, norm.offset, norm.quant
    plan = plan_of(key, group_name, a.device, lambda ranks: NormedCall.of(a, len(b), quantize, norm, ranks))
    if not plan.counted():
        return None
    return cast(tuple[Tensor, ...], plan.run(a.device, a, b, scales, residual, norm))
