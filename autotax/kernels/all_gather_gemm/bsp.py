"""bsp: the bulk-synchronous baseline. The collective library gathers A, then the vendor's GEMM multiplies all of A."""

from __future__ import annotations

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.operators.all_gather_gemm import AllGatherGemm


class Bsp(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.gathered = context.empty((world, rows, cols), context.dtype(problem))
        self.whole = self.gathered.view(-1, cols)[: problem.m]
        if problem.shard == "k":
            self.whole = context.empty((problem.m, problem.k), self.gathered.dtype)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        context = self.context
        context.all_gather(self.gathered, a)
        if self.problem.shard == "k":
            context.copy(self.whole.view(self.problem.m, self.problem.world_size, -1), self.gathered.transpose(0, 1))
        context.matmul(self.whole, b, out)
