"""The alternative to bsp in comparisons: the other way in which serving engines merge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.bsp import all_reduce, reduce_scatter
from autotax.kernels.kernel import Kernel
from autotax.operators.decode_merge import DecodeMerge


class GatherAndReduce(Kernel[DecodeMerge]):
    """The library's all-gather of the log-sum-exps, each rank's O times its weight in float32, and the library's reduce-scatter,
    or for a replicated output its all-reduce.
    """

    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.sums = context.empty((problem.world_size, problem.batch, problem.heads), torch.float32)
        self.received = context.empty((problem.out_heads, problem.batch, problem.head_dim), torch.float32)
        self.to_e = math.log(2.0) if problem.base == "2" else 1.0

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor) -> None:
        problem, context = self.problem, self.context
        if context.dry:
            return
        context.all_gather(self.sums, lse)
        natural = torch.where(self.sums.isfinite(), self.sums * self.to_e, -math.inf)
        whole = torch.logsumexp(natural, 0)
        share = torch.exp(natural[context.rank] - whole).nan_to_num_(0.0)[..., None]
        # Moves heads to the front, so that the heads of each rank are contiguous.
        weighed = torch.where(share > 0, share * o, 0.0).transpose(0, 1).contiguous()
        first = 0
        if problem.output == "head_scatter":
            first = context.rank * problem.out_heads
            reduce_scatter(context, self.received, weighed)
            weighed = self.received
        else:
            all_reduce(context, weighed)
        out.copy_(weighed.transpose(0, 1))
        merged.copy_(whole[:, first : first + problem.out_heads] / self.to_e)
