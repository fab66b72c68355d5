"""bsp: the bulk-synchronous baseline. The vendor's GEMM, then the collective library's reduce-scatter or all-reduce.

The library adds in the problem's type and in an order of its own: NCCL's, which is what models use today. That equal inputs give
equal bits is promised by the other variants only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.addends import Adding
from autotax.kernels.gemm_reduce_scatter.collectives import all_reduce, reduce_scatter
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


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
