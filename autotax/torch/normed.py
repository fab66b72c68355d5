"""A row-parallel product, its sum over the ranks, the residual and RMSNorm in one kernel.

Torch has no such operator, and a caller that gets None runs these one after another. Serving engines call it: see
`autotax.engines.norms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor

from autotax.core.errors import UsageError
from autotax.nn.consensus import DTYPES
from autotax.operators import registry
from autotax.operators.problems import AllReduceNorm
from autotax.operators.scaled import SCALES_OF
from autotax.torch.plans import Call, NotTaken, plan_of
from autotax.torch.symm_mem import aligned, ready

NORMED = "fused_matmul_all_reduce_norm"


class RmsNorm(NamedTuple):
    """A norm: its weight [n], the epsilon of the mean square, and 1 where the weight is stored as its difference from 1."""

    weight: Tensor
    eps: float
    offset: int = 0


@dataclass(frozen=True)
class NormedCall(Call):
    """One kind of call of `matmul_all_reduce_norm`."""

    problem: AllReduceNorm

    @classmethod
    def of(cls, a: Tensor, n: int, quantize: str, offset: int, ranks: int) -> NormedCall:
        if a.dtype not in DTYPES or not a.numel():
            raise NotTaken(f"A is {a.dtype} {list(a.shape)}; kernels take {', '.join(DTYPES.values())}")
        (rows, k), front = a.shape, (SCALES_OF[quantize], quantize) if quantize else ()
        try:
            return cls(AllReduceNorm(rows, n, DTYPES[a.dtype], ranks, "added", "none", offset, k, *front))
        except UsageError as error:
            raise NotTaken(str(error)) from None

    def require(self, kernel: Any) -> None:
        if kernel.config.variant == registry.of(self.problem).baseline:
            raise NotTaken("a product, a sum and a norm one after another are the fastest")

    def run(
        self, kernel: Any, a: Tensor, b: Tensor, scales: tuple[Tensor, ...], residual: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        y, total = (a.new_empty(residual.shape) for _ in range(2))
        kernel(ready(a), aligned(b), *scales, aligned(norm.weight), total, ready(residual), y, eps=norm.eps)
        return y, total


def matmul_all_reduce_norm(
    a: Tensor, b: Tensor, scales: tuple[Tensor, ...], quantize: str, residual: Tensor, norm: RmsNorm, group_name: str
) -> tuple[Tensor, Tensor] | None:
    """y and the new residual S. S is the sum over the ranks of a @ b.t(), + residual; y is its norm. None without a kernel.

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
    if a.dim() != 2 or residual.shape != (len(a), len(b)) or not a.dtype == residual.dtype == norm.weight.dtype:
        return None
    key = NORMED, a.shape, a.dtype, b.shape, quantize, norm.offset
    plan = plan_of(key, group_name, a.device, lambda ranks: NormedCall.of(a, len(b), quantize, norm.offset, ranks))
    if not plan.counted():
        return None
    return cast(tuple[Tensor, Tensor], plan.run(a.device, a, b, scales, residual, norm))
