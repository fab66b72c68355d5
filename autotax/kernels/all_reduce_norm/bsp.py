"""bsp: the bulk-synchronous baseline: the collective library's all-reduce, then one kernel that adds, norms and quantises."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_reduce_norm.norm import NormKernel, finish, given_factor
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.bsp import all_reduce
from autotax.operators.all_reduce_norm import AllReduceNorm


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

    def norm(self, total: Tensor, residual: Tensor, *others: Tensor, eps: float) -> None:
        m = self.problem.m
        self.context.launch(norm_kernel, (ceil_div(m, self.rows),), total, residual, *others, m, eps, **self.constants)

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
    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """See NormKernel.run."""
        if not self.problem.k:  # the product is in the sums already
            self.context.copy(self.sums, x)
        all_reduce(self.context, self.sums)
        self.norm(self.sums, residual, weight, new_residual, y, scales, eps=eps)
