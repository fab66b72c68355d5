"""The base of all kernels for e4m3: the arguments of a call, quantisation, and the scales of all of A."""

from __future__ import annotations

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.scaled_gather import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.operators.all_gather_gemm import AllGatherGemm


class Scaled(Kernel[AllGatherGemm]):
    """Arguments, scales and quantisation of a kernel for e4m3. Tensors of a call: A, B, the scales of A unless a call makes
    them, the scales of B, C.
    """

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.rows = problem.shard_rows
        self.quantised = Quantiser(problem, self.rows, context)
        self.groups, self.quant = self.quantised.groups, self.quantised.quant

    def __call__(self, a: Tensor, b: Tensor, *rest: Tensor) -> None:
        """See Kernel.__call__."""
        *of_a, scales_b, out = rest
        self.run(a, of_a[0] if of_a else None, b, scales_b, out)

    def run(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """Enqueues a call. `scales_a` is None where the call makes them."""
        raise NotImplementedError

    def whole_scales(self, gathered: Tensor, scales_a: Tensor) -> Tensor:
        """The scales of all of A in their layout, from [groups, m] or, with scales `tensor`, from those of this rank."""
        return scales_a if self.problem.scales == "tensor" else gathered.t()
