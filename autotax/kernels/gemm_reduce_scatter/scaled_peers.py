"""Alternatives for e4m3: torch's fused operator, its sums of symmetric memory, and the product alone.

`_fast` stands for fast accumulation: see `all_gather_gemm/scaled_peers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.scaled_gather import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter import peers
from autotax.kernels.gemm_reduce_scatter.bsp import Bsp
from autotax.kernels.gemm_reduce_scatter.scaled import Scaled
from autotax.kernels.kernel import Kernel
from autotax.kernels.scaled_product import FAST, LIBRARY
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


class TorchScaled(Kernel[GemmReduceScatter]):
    """torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter. It returns a new tensor."""

    fast = False

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.quantised = Quantiser(problem, problem.m, context)

    def __call__(self, a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:  # type: ignore[override]
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
    fast = True


class _OfLibrary(Scaled):
    """A plain alternative with the library's product of e4m3."""

    name = LIBRARY

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:  # noqa: ARG002
        super().__init__(problem, Config.of("bsp", product=self.name), context)


class NcclFast(_OfLibrary, Bsp):
    """The baseline with the library's fast accumulation."""

    name = FAST


class TorchReduceScatter(_OfLibrary, peers.TorchReduceScatter):  # type: ignore[misc]
    """See peers.TorchReduceScatter."""


class TorchOneShot(_OfLibrary, peers.TorchOneShot):  # type: ignore[misc]
    """See peers.TorchOneShot."""


class TorchTwoShot(_OfLibrary, peers.TorchTwoShot):  # type: ignore[misc]
    """See peers.TorchTwoShot."""


class ProductAlone(_OfLibrary, peers.Product):  # type: ignore[misc]
    """See peers.Product."""


def _by_dtype(plain: Any, scaled: Any) -> Callable[[GemmReduceScatter, Config, Context], Kernel[GemmReduceScatter]]:
    def kernel(problem: GemmReduceScatter, config: Config, context: Context) -> Kernel[GemmReduceScatter]:
        return (scaled if problem.dtype == "e4m3" else plain)(problem, config, context)  # type: ignore[no-any-return]

    return kernel


torch_fused = _by_dtype(peers.TorchFused, TorchScaled)
torch_reduce_scatter = _by_dtype(peers.TorchReduceScatter, TorchReduceScatter)
torch_one_shot = _by_dtype(peers.TorchOneShot, TorchOneShot)
torch_two_shot = _by_dtype(peers.TorchTwoShot, TorchTwoShot)
product = _by_dtype(peers.Product, ProductAlone)
