"""Alternatives in comparisons: sums of libraries, followed by our norm; and the fused kernels of FlashInfer and SGLang.

Kernels of serving engines are those of their newest releases, imported only where they are measured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_reduce_norm.norm import AfterSum, NormKernel
from autotax.kernels.all_reduce_norm.scaled_norms import ScaledNorm
from autotax.kernels.context import Context
from autotax.kernels.libraries import IrisSum, group_name, symmetric
from autotax.operators.all_reduce_norm import AllReduceNorm


class TorchSum(AfterSum):
    """Copies x to torch's symmetric memory and sums it there. A product is stored there at once."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.group = group_name(context)
        self.partial = self.products = symmetric(context, (problem.m, problem.hidden), context.dtype(problem))

    def changes_for(self, smaller: AllReduceNorm) -> dict[str, Any] | None:
        return (super().changes_for(smaller) or {}) | {"partial": self.partial[: smaller.m]}

    def compute_sums(self, x: Tensor) -> None:
        if not self.problem.k:
            self.context.copy(self.partial, x)
        if not self.context.dry:
            self.add_up()

    @abstractmethod
    def add_up(self) -> None:
        """Writes the sum of all ranks' `partial` to `sums`."""


class TorchOneShot(TorchSum):
    """With torch.ops.symm_mem.one_shot_all_reduce_out: every rank reads the data of all others."""

    def add_up(self) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(self.partial, "sum", self.group, self.sums)


class TorchTwoShot(TorchSum):
    """With torch.ops.symm_mem.two_shot_all_reduce_out: every rank adds up its part and sends it to all ranks."""

    def add_up(self) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_out(self.partial, "sum", self.group, self.sums)


class TorchReduceScatter(TorchSum):
    """With torch.ops.symm_mem.reduce_scatter_out: each rank adds up its rows, which the library gathers before the norm."""

    def add_up(self) -> None:
        rows = len(self.sums) // self.problem.world_size
        own = self.sums[self.context.rank * rows : (self.context.rank + 1) * rows]
        torch.ops.symm_mem.reduce_scatter_out(self.partial.view(-1), self.group, False, own.view(-1))
        self.context.all_gather(self.sums, own)

    def changes_for(self, smaller: AllReduceNorm) -> dict[str, Any] | None:
        """Supports numbers of rows that the ranks divide."""
        return super().changes_for(smaller) if smaller.m % smaller.world_size == 0 else None


class TorchOneShotScaled(ScaledNorm, TorchOneShot):
    """See TorchOneShot."""


class TorchTwoShotScaled(ScaledNorm, TorchTwoShot):
    """See TorchTwoShot."""


class TorchReduceScatterScaled(ScaledNorm, TorchReduceScatter):
    """See TorchReduceScatter."""


class FlashInfer(NormKernel):
    """FlashInfer's fusion by IPC, as vLLM and SGLang call it."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        import flashinfer.comm as comm  # type: ignore[import-not-found]
        from flashinfer.comm.mnnvl import TorchDistBackend  # type: ignore[import-not-found]

        self.comm, world = comm, context.world
        self.workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=world.size,
            rank=world.rank,
            max_token_num=problem.m,
            hidden_dim=problem.hidden,
            dtype=context.dtype(problem),
            comm_backend=TorchDistBackend(group=world.data),
        )

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float  # noqa: ARG002
    ) -> None:
        if not self.context.dry:
            self.comm.allreduce_fusion(
                input=x,
                workspace=self.workspace,
                pattern=self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
                launch_with_pdl=True,
                residual_in=residual,
                residual_out=new_residual,
                norm_out=y,
                rms_gamma=weight,
                rms_eps=eps,
                fp32_acc=True,
            )


class IrisAllReduce(IrisSum[AllReduceNorm], AfterSum):
    """iris.ccl.all_reduce of a copy of x."""

    def shapes(self, problem: AllReduceNorm) -> dict[str, Sequence[int]]:
        return dict.fromkeys(("partial", "sum"), (problem.m, problem.hidden))

    def room(self, problem: AllReduceNorm) -> Tensor:
        return self.rooms["sum"] if self.rooms else super().room(problem)

    def compute_sums(self, x: Tensor) -> None:
        if not self.context.dry:
            self.rooms["partial"].copy_(x)
            self.add_up()


class IrisAllReduceTuned(IrisAllReduce):
    tuned = True


class VllmSum(AfterSum):
    """With vLLM's `CustomAllreduce`. It copies x to memory that the peers can read: no graph has registered x."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce  # type: ignore[import-not-found]

        self.reduce = CustomAllreduce(context.world.control, context.world.device)
        if self.reduce.disabled:
            raise RuntimeError("vLLM has disabled its custom all-reduce here")

    def compute_sums(self, x: Tensor) -> None:
        if not self.context.dry:
            self.reduce.all_reduce(x, out=self.sums)


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
        communicator = _communicators[size]
        if communicator.disabled or not fusion.fits_push_slot(communicator.max_push_size, problem.m, problem.hidden):
            raise RuntimeError("SGLang has disabled its all-reduce here, or rows do not fit in its memory")
        self.fusion, self.communicator = fusion, communicator

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float  # noqa: ARG002
    ) -> None:
        if self.context.dry:
            return
        problem = self.problem
        sizes = problem.world_size, problem.m, problem.hidden
        two_shot, vectors, cluster = self.fusion._norm_launch(*sizes, False, None, None, None)
        self.fusion._all_reduce_residual_norm_op(
            problem.world_size, problem.hidden, cluster, y, x, weight, eps, residual, new_residual, float(problem.offset),
            two_shot, vectors,
        )  # fmt: skip
