"""bsp: the bulk-synchronous baseline. The collective library gathers A, then the vendor's GEMM multiplies all of A.

`ScaledBsp` is the edition for e4m3: one call of the library gathers bytes and scales, and the product is tuned.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.scaled_shards import Scaled, codes_of
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.scaled_product import ScaledProduct
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


class ScaledBsp(Scaled):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world = problem.world_size
        self.gathered = context.empty((world, self.rows, problem.k), codes_of(problem))
        self.whole = self.gathered.view(-1, problem.k)[: problem.m]
        self.scales = context.empty((world, max(1, self.groups), self.rows), torch.float32)
        self.ordered = context.empty((max(1, self.groups), problem.m), torch.float32)
        self.product = ScaledProduct(problem, config, problem.m, context)

    def run(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        m = self.problem.m
        codes, scales = self.quantised(a, scales_a)
        self.gather(codes, scales)
        ordered = self.scales.view(1, -1)[:, :m]
        if self.groups > 1:
            ordered = self.ordered
            for source in range(self.problem.world_size):
                rows = min(self.rows, m - source * self.rows)
                if rows > 0:
                    self.context.copy(ordered[:, source * self.rows :][:, :rows], self.scales[source, :, :rows])
        self.product(self.whole, self.whole_scales(ordered, scales), b, scales_b, out)

    def gather(self, codes: Tensor, scales: Tensor) -> None:
        """One call of the collective library for bytes and scales. Libraries for CPU ranks need two calls."""
        context = self.context
        if context.dry:
            return
        with self.together() if self.groups and codes.is_cuda else nullcontext():
            context.all_gather(self.gathered, codes)
            if self.groups:
                context.all_gather(self.scales, scales.t())

    def together(self) -> Any:
        """Makes one call of all collectives inside the `with` block."""
        return dist._coalescing_manager(group=self.context.world.data, device=self.gathered.device)

    def gathered_codes(self, a: Tensor, scales_a: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """A [m, k] and its scales as the last call has gathered them, in workspaces."""
        ordered = self.ordered if self.groups > 1 else self.scales.view(1, -1)[:, : self.problem.m]
        return self.whole, self.whole_scales(ordered, scales_a)

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows."""
        world, rows, groups = smaller.world_size, smaller.shard_rows, max(1, self.groups)
        gathered = self.gathered.view(-1)[: world * rows * smaller.k].view(world, rows, smaller.k)
        return {
            "rows": rows, "gathered": gathered, "whole": gathered.view(-1, smaller.k)[: smaller.m],
            "scales": self.scales.view(-1)[: world * groups * rows].view(world, groups, rows),
            "ordered": self.ordered.view(-1)[: groups * smaller.m].view(groups, smaller.m),
        }  # fmt: skip


def bsp(problem: AllGatherGemm, config: Config, context: Context) -> Kernel[AllGatherGemm]:
    """The baseline of the problem's dtype."""
    return (ScaledBsp if problem.dtype == "e4m3" else Bsp)(problem, config, context)
