"""Alternatives that a tuned config is compared with, in addition to bsp: torch's fused operator, and the GEMM alone."""

from __future__ import annotations

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.operators.all_gather_gemm import AllGatherGemm


class TorchFused(Kernel[AllGatherGemm]):
    """torch.ops.symm_mem.fused_all_gather_matmul, for A sharded along M. It returns a new tensor."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if self.context.dry:
            return out
        group = self.context.world.data.group_name
        _, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b.t()], 0, group)
        return product[: self.problem.m]


class Product(Kernel[AllGatherGemm]):
    """The vendor's GEMM on an A that was gathered earlier: a lower bound on the time of any variant.

    Each tensor A is gathered at the first call with it, so its contents must not change afterwards.
    """

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self._whole: dict[int, Tensor] = {}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if not self.context.dry:
            self.context.matmul(self._gathered(a), b, out)

    def _gathered(self, a: Tensor) -> Tensor:
        if a.data_ptr() not in self._whole:
            world, problem = self.problem.world_size, self.problem
            gathered = self.context.empty((world, *a.shape), a.dtype)
            self.context.all_gather(gathered, a)
            if problem.shard == "k":
                gathered = gathered.transpose(0, 1).contiguous()
            self._whole[a.data_ptr()] = gathered.view(-1, problem.k)[: problem.m]
        return self._whole[a.data_ptr()]
