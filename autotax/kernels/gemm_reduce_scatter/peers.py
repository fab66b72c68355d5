"""Alternatives, which may win: torch's operators, other calls of the collective library, Iris. And the GEMM alone, a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.bsp import Bsp
from autotax.kernels.gemm_reduce_scatter.scaled_sums import Multiplying, Scaled
from autotax.kernels.kernel import Kernel
from autotax.kernels.libraries import TILES, DeepGemm, IrisCall, IrisSum, Nccl, group_name, keep_workspace, pipeline, symmetric
from autotax.kernels.scaled_product import FAST, LIBRARY
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


def _columns(problem: GemmReduceScatter, b: Tensor) -> Tensor:
    """B as [k, n], whatever its strides."""
    return b.t() if problem.weight == "nk" else b


class TorchFused(Kernel[GemmReduceScatter]):
    """torch.ops.symm_mem.fused_matmul_reduce_scatter, for rows that the ranks divide. It returns a new tensor."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if self.context.dry:
            return out
        import torch.distributed._symmetric_memory  # registers the operator

        columns = _columns(self.problem, b)
        result: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, columns, "sum", 0, group_name(self.context))
        return result


class TorchPipeline(Kernel[GemmReduceScatter]):
    """Torch's fused operator step by step, in memory allocated once, with the sum in the output. Ranks must divide the rows."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.parts = context.empty((problem.m, problem.n), context.dtype(problem))
        self.torch = pipeline(context, 2 * problem.shard_rows * problem.n * problem.item_size)
        self.group = group_name(context)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            return
        columns, rows = _columns(self.problem, b), self.problem.shard_rows

        def multiply(owner: int, part: Tensor) -> None:
            torch.mm(a[owner * rows : (owner + 1) * rows], columns, out=part)

        self.torch._pipelined_produce_and_all2all(multiply, self.parts, self.group)
        torch.sum(self.parts.view(-1, rows, self.problem.n), 0, out=out)
        keep_workspace(self.torch, self.group)

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any] | None:
        """Supports numbers of rows that the ranks divide."""
        return {"parts": self.parts[: smaller.m]} if smaller.m % smaller.world_size == 0 else None


class TorchSymmetric(Kernel[GemmReduceScatter]):
    """The vendor's GEMM into torch's symmetric memory, then one of torch's kernels that add up from there."""

    OPERATOR: str

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.group = group_name(context)
        self.partial = symmetric(context, (problem.m, problem.n), context.dtype(problem))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if not self.context.dry:
            self.context.matmul(a, _columns(self.problem, b).t(), self.partial)
            self.add_up(out)

    def add_up(self, out: Tensor) -> None:
        """Writes the sum of all ranks' `partial`, or this rank's part of the sum."""
        getattr(torch.ops.symm_mem, self.OPERATOR)(self.partial, "sum", self.group, out)

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any] | None:
        """Supports any number of rows, or for a scattered output those that the ranks divide."""
        even = smaller.output == "replicated" or smaller.m % smaller.world_size == 0
        return {"partial": self.partial[: smaller.m]} if even else None


class TorchReduceScatter(TorchSymmetric):
    """Uses torch.ops.symm_mem.reduce_scatter_out, which takes tensors of one dimension."""

    def add_up(self, out: Tensor) -> None:
        torch.ops.symm_mem.reduce_scatter_out(self.partial.view(-1), self.group, False, out.view(-1))


class TorchOneShot(TorchSymmetric):
    """Every rank reads the partial sums of all other ranks."""

    OPERATOR = "one_shot_all_reduce_out"


class TorchTwoShot(TorchSymmetric):
    """Every rank adds up its part and sends it to all."""

    OPERATOR = "two_shot_all_reduce_out"


class AllToAll(Kernel[GemmReduceScatter]):
    """The vendor's GEMM, the library's all-to-all, and a sum by torch; for a replicated output then the library's all-gather.

    Torch adds in float32 and rounds once, where the library's reduction rounds after each rank.
    """

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shape = (problem.world_size, problem.shard_rows, problem.n)
        self.partial, self.parts, self.whole = (context.empty(shape, context.dtype(problem)) for _ in range(3))
        self.partial.zero_()  # rows of padding

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        context, problem = self.context, self.problem
        if context.dry:
            return
        torch.mm(a, _columns(problem, b), out=self.partial.view(-1, problem.n)[: problem.m])
        context.all_to_all(self.parts, self.partial)
        if problem.output == "scattered":
            torch.sum(self.parts, 0, out=out)
            return
        sums = self.parts[context.rank]
        torch.sum(self.parts, 0, out=self.whole[0])
        sums.copy_(self.whole[0])
        context.all_gather(self.whole, sums)
        out.copy_(self.whole.view(-1, problem.n)[: problem.m])

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any] | None:
        """Supports any number of rows. For a scattered output the ranks must divide it: padding keeps rows of earlier calls."""
        if smaller.output == "scattered" and smaller.m % smaller.world_size:
            return None
        shape = (smaller.world_size, smaller.shard_rows, smaller.n)
        return {name: getattr(self, name).view(-1)[: math.prod(shape)].view(shape) for name in ("partial", "parts", "whole")}


class NcclLL(Nccl, Bsp):
    """Words of eight bytes, half of them flags: the fewest steps."""

    PROTOCOL = "LL"


class NcclLL128(Nccl, Bsp):
    """Lines of 128 bytes, eight of them flags."""

    PROTOCOL = "LL128"


class Product(Kernel[GemmReduceScatter]):
    """The vendor's GEMM alone: a lower bound on the time of any variant.

    The first call with a tensor computes its sum, so the contents must not change afterwards. Beside each GEMM a copy engine
    copies that sum to the output, so that verification passes.
    """

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.whole = Bsp(problem, config, context)
        self.partial = context.empty((problem.m, problem.n), context.dtype(problem))
        self.beside = context.streams(1)
        self._sums: dict[int, Tensor] = {}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        context = self.context
        if context.dry:
            return
        if a.data_ptr() not in self._sums:
            self.whole(a, b, out)
            self._sums[a.data_ptr()] = out.clone()
        with context.beside(self.beside[0]):
            context.copy(out, self._sums[a.data_ptr()])
        context.matmul(a, _columns(self.problem, b).t(), self.partial)
        context.rejoin(self.beside)


class TorchScaled(Kernel[GemmReduceScatter]):
    """torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter. It returns a new tensor."""

    fast = False

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.quantised = Quantiser(problem, problem.m, context)

    def __call__(self, a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        *of_a, scales_b, out = rest
        a, scales_a = self.quantised(a, of_a[0] if of_a else None)
        if self.context.dry:
            return out
        import torch.distributed._symmetric_memory  # registers the operator

        if self.problem.scales == "tensor":
            scales_a, scales_b = scales_a.view(()), scales_b.view(())
        result: Tensor = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            a, b.t(), scales_a, scales_b, "sum", 0, 0, self.context.world.data.group_name, [self.problem.m, self.problem.n],
            None, None, out.dtype, self.fast,
        )  # fmt: skip
        return result


class TorchScaledFast(TorchScaled):
    """With fast accumulation, whose errors grow with K: tensor cores add up all of K with fewer bits than float32 has."""

    fast = True


class _OfLibrary(Scaled):
    """A plain alternative with the library's product of e4m3."""

    name = LIBRARY

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:  # noqa: ARG002
        super().__init__(problem, Config.of("bsp", product=self.name), context)


class NcclFast(_OfLibrary, Bsp):
    """The baseline with the library's fast accumulation."""

    name = FAST


class NcclDeepGemm(_OfLibrary, Bsp):
    """The baseline with DeepGEMM's product."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.context = Multiplying(context, DeepGemm(context))  # type: ignore[assignment]


class TorchReduceScatterScaled(_OfLibrary, TorchReduceScatter):
    """See TorchReduceScatter."""


class TorchOneShotScaled(_OfLibrary, TorchOneShot):
    """See TorchOneShot."""


class TorchTwoShotScaled(_OfLibrary, TorchTwoShot):
    """See TorchTwoShot."""


class ProductScaled(_OfLibrary, Product):
    """See Product."""


def product(problem: GemmReduceScatter, config: Config, context: Context) -> Kernel[GemmReduceScatter]:
    """The product alone, of the problem's dtype."""
    return (ProductScaled if problem.dtype == "e4m3" else Product)(problem, config, context)


# Iris, imported where it is measured only.

class MatmulReduceScatter(IrisCall[GemmReduceScatter]):
    """iris.ops.matmul_reduce_scatter: each rank adds up the tiles of its rows from the partial products of all ranks."""

    CHOICES = TILES
    OPERATOR = "matmul_reduce_scatter"

    def shapes(self, problem: GemmReduceScatter) -> dict[str, Sequence[int]]:
        return {"sum": (problem.m, problem.n)}

    def workspace_elements(self, problem: GemmReduceScatter) -> int:
        """The partial product, and a flag for each of its tiles."""
        return 2 * problem.m * problem.n

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            return
        self.check_tiles()
        with self.barriers():
            self.multiply(a, _columns(self.problem, b))
        rows = self.problem.out_rows
        first = self.context.rank * rows if self.problem.output == "scattered" else 0
        out.copy_(self.rooms["sum"][first : first + rows])

    def check_tiles(self) -> None:
        """Raises ValueError if the tiles of a rank are not its rows."""
        rows = self.choice.get("block_size_m", 256)
        if self.problem.m % (rows * self.problem.world_size):
            raise ValueError(f"{self.problem.m} rows are no equal number of tiles of {rows} rows for each rank")

    def multiply(self, a: Tensor, b: Tensor) -> None:
        """Writes the sum. B is [k, n]. The namespace of a context passes one argument too many, so the function is called."""
        from iris import ops

        config, operator = ops.FusedConfig(**self.choice), getattr(ops, self.OPERATOR)
        self.workspace = operator(self.iris, self.rooms["sum"], a, b, async_op=True, config=config, workspace=self.workspace)


class MatmulReduceScatterTuned(MatmulReduceScatter):
    tuned = True


class MatmulAllReduce(MatmulReduceScatter):
    """iris.ops.matmul_all_reduce: by default each rank adds up a part of the tiles and stores the sums to all."""

    CHOICES = (*TILES, *({**tiles, "all_reduce_variant": "one_shot"} for tiles in TILES[1::2]))
    OPERATOR = "matmul_all_reduce"

    def check_tiles(self) -> None:
        """Tiles belong to no rank: the operator checks them."""


class MatmulAllReduceTuned(MatmulAllReduce):
    tuned = True


class AllReduce(IrisSum[GemmReduceScatter]):
    """The vendor's GEMM, then iris.ccl.all_reduce."""

    def shapes(self, problem: GemmReduceScatter) -> dict[str, Sequence[int]]:
        return dict.fromkeys(("partial", "sum"), (problem.m, problem.n))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            return
        self.context.matmul(a, _columns(self.problem, b).t(), self.rooms["partial"])
        self.add_up()
        out.copy_(self.rooms["sum"])


class AllReduceTuned(AllReduce):
    tuned = True
