"""Alternatives that a tuned config is compared with, and that may win: torch's fused operator, NCCL in its protocols. And the
GEMM alone, a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.bsp import Bsp, ScaledBsp
from autotax.kernels.all_gather_gemm.scaled_shards import Scaled
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.libraries import COPIES, TILES, DeepGemm, IrisCall, Nccl, group_name, keep_workspace, pipeline, symmetric
from autotax.kernels.scaled_product import FAST, LIBRARY
from autotax.operators.all_gather_gemm import AllGatherGemm


class TorchFused(Kernel[AllGatherGemm]):
    """torch.ops.symm_mem.fused_all_gather_matmul, for A sharded along M. It returns a new tensor."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if self.context.dry:
            return out
        import torch.distributed._symmetric_memory  # registers the operator

        _, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b.t()], 0, group_name(self.context))
        return product[: self.problem.m]


class FlashInfer(Kernel[AllGatherGemm]):
    """flashinfer.comm.all_gather_matmul, of a copy of this rank's rows. It returns a new tensor, and the ranks meet in each call."""

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shard = symmetric(context, (problem.shard_rows, problem.k), context.dtype(problem))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if self.context.dry:
            return out
        from flashinfer.comm import all_gather_matmul  # type: ignore[import-not-found]

        self.shard.copy_(a)
        product: Tensor = all_gather_matmul(self.shard, b.t(), self.context.world.data)
        return product


class TorchPipeline(Kernel[AllGatherGemm]):
    """The steps of torch.ops.symm_mem.fused_all_gather_matmul for A sharded along M, in memory that is allocated once."""

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        rows = problem.world_size * problem.shard_rows
        self.whole = context.empty((rows, problem.k), context.dtype(problem))
        self.torch = pipeline(context, problem.shard_rows * problem.k * problem.item_size)
        self.group = group_name(context)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            return
        columns = b.t()

        def multiply(shard: Tensor, rank: int) -> None:
            torch.mm(shard, columns, out=out[rank * len(shard) : (rank + 1) * len(shard)])

        self.torch._pipelined_all_gather_and_consume(a, multiply, self.whole, self.group, True)
        keep_workspace(self.torch, self.group)

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any] | None:
        """Supports numbers of rows that the ranks divide."""
        return {"whole": self.whole[: smaller.m]} if smaller.m % smaller.world_size == 0 else None


class _Fitting(Bsp):
    """Bulk-synchronous, and for fewer rows too."""

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any] | None:
        """Supports numbers of rows that the ranks divide, for A sharded along M."""
        if smaller.shard == "k" or smaller.m % smaller.world_size:
            return None
        gathered = self.gathered.view(-1)[: smaller.m * smaller.k].view(smaller.world_size, -1, smaller.k)
        return {"gathered": gathered, "whole": gathered.view(-1, smaller.k)}


class NcclLL(Nccl, _Fitting):
    """Words of eight bytes, half of them flags: the fewest steps."""

    PROTOCOL = "LL"


class NcclLL128(Nccl, _Fitting):
    """Lines of 128 bytes, eight of them flags."""

    PROTOCOL = "LL128"


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


# e4m3. `_fast` stands for fast accumulation: tensor cores add up all of K with fewer bits than float32 has. Its errors grow with K,
# so a result may not hold the limits of verification.


class TorchScaled(Scaled):
    """torch.ops.symm_mem.fused_all_gather_scaled_matmul. It returns a new tensor."""

    fast = False

    def run(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor, out: Tensor) -> Tensor:  # type: ignore[override]
        codes, scales = self.quantised(a, scales_a)
        if self.context.dry:
            return out
        group = self.context.world.data.group_name
        whole = (scales.view(()), scales_b.view(())) if self.problem.scales == "tensor" else (scales, scales_b)
        _, (product,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            codes, [b.t()], whole[0], [whole[1]], 0, group, [None], [None], [out.dtype], [self.fast]
        )
        return product[: self.problem.m]

    def __call__(self, a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:  # type: ignore[override]
        """See Kernel.__call__."""
        *of_a, scales_b, out = rest
        return self.run(a, of_a[0] if of_a else None, b, scales_b, out)


class TorchScaledFast(TorchScaled):
    fast = True


class NcclFast(ScaledBsp):
    """The baseline with the library's fast accumulation."""

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:  # noqa: ARG002
        super().__init__(problem, Config.of("bsp", product=FAST), context)


class NcclDeepGemm(ScaledBsp):
    """The baseline with DeepGEMM's product."""

    product: Any

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:  # noqa: ARG002
        super().__init__(problem, Config.of("bsp", product=LIBRARY), context)
        self.product = DeepGemm(context)


class ScaledProductAlone(ScaledBsp):
    """The library's product on an A that was gathered at the first call with it: its contents must not change afterwards."""

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:  # noqa: ARG002
        super().__init__(problem, Config.of("bsp", product=LIBRARY), context)
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            return
        if a.data_ptr() not in self._gathered:
            super().run(a, scales_a, b, scales_b, out)
            _, scales = self.quantised(a, scales_a)
            ordered = self.ordered if self.groups > 1 else self.scales.view(1, -1)[:, : self.problem.m]
            self._gathered[a.data_ptr()] = (self.whole.clone(), self.whole_scales(ordered.clone(), scales.clone()))
        self.product(*self._gathered[a.data_ptr()], b, scales_b, out)


def product(problem: AllGatherGemm, config: Config, context: Context) -> Kernel[AllGatherGemm]:
    """The product alone for the problem's dtype."""
    return (ScaledProductAlone if problem.dtype == "e4m3" else Product)(problem, config, context)


# Iris, imported where it is measured only.

class AllGatherMatmul(IrisCall[AllGatherGemm]):
    """iris.ops.all_gather_matmul: tiles of the product load their part of A from the peers."""

    CHOICES = TILES

    def shapes(self, problem: AllGatherGemm) -> dict[str, Sequence[int]]:
        return {"a": (problem.shard_rows, problem.shard_cols)}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            return
        self.rooms["a"].copy_(a)
        with self.barriers():
            self.multiply(b.t(), out)

    def multiply(self, b: Tensor, out: Tensor) -> None:
        """Gathers and multiplies. B is [k, n]."""
        from iris import ops

        ops.all_gather_matmul(self.iris, out, self.rooms["a"], b, async_op=True, config=ops.FusedConfig(**self.choice))


class AllGatherMatmulTuned(AllGatherMatmul):
    tuned = True


class HbmBuffer(AllGatherMatmul):
    """iris.ops.all_gather_matmul_hbm_buffer: some programs fetch A into a buffer, where the others wait for it."""

    CHOICES = ({}, {"block_size_m": 128, "block_size_n": 128}, {"block_size_m": 64, "block_size_n": 128})

    def workspace_elements(self, problem: AllGatherGemm) -> int:
        """The buffer, and a flag for each of its blocks at most."""
        return 2 * problem.m * problem.k

    def multiply(self, b: Tensor, out: Tensor) -> None:
        """See AllGatherMatmul.multiply. Without a config the operator derives one from the sizes."""
        from iris import ops

        config = ops.FusedConfig(**self.choice) if self.choice else None
        self.workspace = ops.all_gather_matmul_hbm_buffer(
            self.iris, out, self.rooms["a"], b, async_op=True, config=config, workspace=self.workspace
        )


class HbmBufferTuned(HbmBuffer):
    tuned = True


class AllGather(IrisCall[AllGatherGemm]):
    """iris.ccl.all_gather for A sharded along M, then the vendor's GEMM."""

    CHOICES = COPIES

    def shapes(self, problem: AllGatherGemm) -> dict[str, Sequence[int]]:
        return {"whole": (problem.world_size * problem.shard_rows, problem.k)}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            return
        from iris.ccl.all_gather import all_gather
        from iris.ccl.config import Config

        whole = self.rooms["whole"]
        with self.barriers():
            all_gather(whole, a, self.iris, async_op=True, config=Config(**self.choice) if self.choice else None)
        torch.mm(whole[: self.problem.m], b.t(), out=out)


class AllGatherTuned(AllGather):
    tuned = True
