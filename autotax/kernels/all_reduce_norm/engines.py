"""The kernels of serving engines as rows of comparisons, imported only where they are measured: vLLM's custom all-reduce, with our
norm behind it, and SGLang's push kernel, which also adds and norms. Both are those of their newest releases.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_reduce_norm.bsp import AfterSum
from autotax.kernels.all_reduce_norm.norm import NormKernel
from autotax.kernels.context import Context
from autotax.operators.all_reduce_norm import AllReduceNorm


class VllmSum(AfterSum):
    """`CustomAllreduce` copies x to memory that the peers can read, as it does where a graph has not registered x with it."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce  # type: ignore[import-not-found]

        self.reduce = CustomAllreduce(context.world.control, context.world.device)
        if self.reduce.disabled:
            raise RuntimeError("vLLM has disabled its custom all-reduce here")

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """See NormKernel.run."""
        if not self.context.dry:
            self.reduce.all_reduce(x, out=self.sums)
        self.norm(self.sums, residual, weight, new_residual, y, scales, eps=eps)


_communicators: dict[int, Any] = {}
"""SGLang's, by ranks: it allows one a process."""


class SglangPush(NormKernel):
    """The kernel of `all_reduce_residual_norm`, launched as that function launches it."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        from sglang.kernels.ops.communication import all_reduce_fusion as fusion  # type: ignore[import-not-found]
        from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2  # type: ignore[import-not-found]

        size, world = problem.world_size, context.world
        if size not in _communicators:
            _communicators[size] = CustomAllReduceV2(world.control, world.device)
            if not _communicators[size].disabled:
                fusion.register_comm(_communicators[size].obj)
        made = _communicators[size]
        if made.disabled or not fusion.fits_push_slot(made.max_push_size, problem.m, problem.hidden):
            raise RuntimeError("SGLang has disabled its all-reduce here, or rows do not fit in its memory")
        self.fusion, self.made = fusion, made

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float  # noqa: ARG002
    ) -> None:
        """See NormKernel.run."""
        if self.context.dry:
            return
        problem = self.problem
        sizes = problem.world_size, problem.m, problem.hidden
        two_shot, vectors, cluster = self.fusion._norm_launch(*sizes, False, None, None, None)
        self.fusion._all_reduce_residual_norm_op(
            problem.world_size, problem.hidden, cluster, y, x, weight, eps, residual, new_residual, float(problem.offset),
            two_shot, vectors,
        )  # fmt: skip
