"""The collective library's sums, in the type of the tensors and in an order of its own: for the baseline and for peers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.addends import Adding
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


def reduce_scatter(context: Context, received: Tensor, sent: Tensor) -> None:
    """`received` = the sum over the ranks of the own part of `sent`, whose first dimension is cut into equal parts."""
    if not context.dry:
        # torch 2.13 renamed it and warns of the old name.
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        scatter(received, sent, group=context.world.data)


def all_reduce(context: Context, tensor: Tensor) -> None:
    """`tensor` = the sum over the ranks."""
    if not context.dry:
        dist.all_reduce(tensor, group=context.world.data)


# bsp: the bulk-synchronous baseline. The vendor's GEMM, then the collective library's reduce-scatter or all-reduce.

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
        """The collective is called for whatever there is: any rows."""
        return {"partial": self.partial[: smaller.world_size * smaller.shard_rows]}
