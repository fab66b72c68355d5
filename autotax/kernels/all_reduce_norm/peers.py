"""Alternatives to bsp in comparisons: sums by torch's symmetric memory, followed by our norm; and FlashInfer's fused kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_reduce_norm.bsp import AfterSum
from autotax.kernels.all_reduce_norm.norm import NormKernel
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
        """See AfterSum.changes_for."""
        return (super().changes_for(smaller) or {}) | {"partial": self.partial[: smaller.m]}

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """See NormKernel.run."""
        if not self.problem.k:
            self.context.copy(self.partial, x)
        if not self.context.dry:
            self.add_up()
        self.norm(self.sums, residual, weight, new_residual, y, scales, eps=eps)

    @abstractmethod
    def add_up(self) -> None:
        """Writes the sum of all ranks' `partial` to `sums`."""


class TorchOneShot(TorchSum):
    """With torch.ops.symm_mem.one_shot_all_reduce_out: every rank reads the data of all others."""

    def add_up(self) -> None:
        """See TorchSum.add_up."""
        torch.ops.symm_mem.one_shot_all_reduce_out(self.partial, "sum", self.group, self.sums)


class TorchTwoShot(TorchSum):
    """With torch.ops.symm_mem.two_shot_all_reduce_out: every rank adds up its part and sends it to all ranks."""

    def add_up(self) -> None:
        """See TorchSum.add_up."""
        torch.ops.symm_mem.two_shot_all_reduce_out(self.partial, "sum", self.group, self.sums)


class TorchReduceScatter(TorchSum):
    """With torch.ops.symm_mem.reduce_scatter_out: each rank adds up its rows, which the collective library gathers before the norm."""

    def add_up(self) -> None:
        """See TorchSum.add_up."""
        rows = len(self.sums) // self.problem.world_size
        own = self.sums[self.context.rank * rows : (self.context.rank + 1) * rows]
        torch.ops.symm_mem.reduce_scatter_out(self.partial.view(-1), self.group, False, own.view(-1))
        self.context.all_gather(self.sums, own)

    def changes_for(self, smaller: AllReduceNorm) -> dict[str, Any] | None:
        """Supports numbers of rows that the ranks divide."""
        return super().changes_for(smaller) if smaller.m % smaller.world_size == 0 else None


class FlashInfer(NormKernel):
    """FlashInfer's fusion by IPC, as vLLM and SGLang call it. It is imported only where it is measured."""

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
        """See NormKernel.run."""
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
        """See AfterSum.room."""
        return self.rooms["sum"] if self.rooms else super().room(problem)

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """See NormKernel.run."""
        if not self.context.dry:
            self.rooms["partial"].copy_(x)
            self.add_up()
        self.norm(self.sums, residual, weight, new_residual, y, scales, eps=eps)


class IrisAllReduceTuned(IrisAllReduce):
    tuned = True
