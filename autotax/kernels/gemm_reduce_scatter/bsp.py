"""The bulk-synchronous baseline, and sums by the collective library, which adds in the tensors' type and in its own order."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.reduction import Adding
from autotax.kernels.gemm_reduce_scatter.scaled_sums import Scaled
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


def reduce_scatter(context: Context, received: Tensor, sent: Tensor) -> None:
    """`received` = the sum over the ranks of this rank's part of `sent`, whose first dimension is cut into equal parts."""
    if not context.dry:
        # torch 2.13 renamed the function and warns about the old name.
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        scatter(received, sent, group=context.world.data)


def all_reduce(context: Context, tensor: Tensor) -> None:
    """`tensor` = the sum over the ranks."""
    if not context.dry:
        dist.all_reduce(tensor, group=context.world.data)


# bsp: the bulk-synchronous baseline. The vendor's GEMM runs first, then the collective library's reduce-scatter or all-reduce.

class Bsp(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        rows = problem.world_size * problem.shard_rows if problem.output == "scattered" else 0
        self.partial = context.empty((rows, problem.n), context.dtype(problem))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        context, m = self.context, self.problem.m
        columns = b if self.problem.weight == "nk" else b.t()
        if self.problem.output == "replicated":
            context.matmul(a, columns, out)
            all_reduce(context, out)
        else:
            context.matmul(a, columns, self.partial[:m])
            if len(self.partial) > m and not context.dry:
                self.partial[m:].zero_()  # padding
            reduce_scatter(context, out, self.partial)
        if not context.dry:
            rows = out if self.problem.output == "replicated" else out[: max(0, m - context.rank * self.problem.shard_rows)]
            for added in (bias, residual):
                if added is not None:
                    rows.add_(added if added.dim() == 1 else added[: len(rows)])

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:
        """Supports any number of rows: the collective is called for the rows of the call."""
        return {"partial": self.partial[: smaller.world_size * smaller.shard_rows]}


class ScaledBsp(Scaled, Bsp):
    """`Bsp` with a product of e4m3."""


def bsp(problem: GemmReduceScatter, config: Config, context: Context) -> Adding:
    """The baseline of the problem's dtype."""
    return (ScaledBsp if problem.dtype == "e4m3" else Bsp)(problem, config, context)
