"""bsp: the bulk-synchronous baseline. The vendor's GEMM, then the collective library's reduce-scatter or all-reduce.

The library adds in the problem's type and in an order of its own: NCCL's, which is what models use today. That equal inputs give
equal bits is promised by the other variants only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.collectives import all_reduce, reduce_scatter
from autotax.kernels.kernel import Kernel
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


class Bsp(Kernel[GemmReduceScatter]):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        rows = problem.world_size * problem.shard_rows if problem.output == "scattered" else 0
        self.partial = context.empty((rows, problem.n), context.dtype(problem))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
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

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:
        """The collective is called for whatever there is: any rows."""
        return {"partial": self.partial[: smaller.world_size * smaller.shard_rows]}
