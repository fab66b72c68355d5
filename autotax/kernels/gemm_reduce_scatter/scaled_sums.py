"""Plain kernels with products of e4m3: a rank's product has scales, its sum over the ranks is the plain kernel's.

Partial sums leave a product in the type of C, as in the plain editions. They are added in float32 in the order of the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.libraries import DeepGemm
from autotax.kernels.scaled_product import ScaledProduct
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.scaled import plain


class Factor(NamedTuple):
    """A matrix with its scales, which a plain kernel slices and passes to `matmul` like a tensor."""

    codes: Tensor
    scales: Tensor

    def __getitem__(self, rows: Any) -> Any:
        return Factor(self.codes[rows], self.scales[rows] if self.scales.dim() == 2 else self.scales)

    def t(self) -> Factor:
        return Factor(self.codes.t(), self.scales if self.scales.dim() == 1 else self.scales.t())

    def data_ptr(self) -> int:
        return self.codes.data_ptr()


class Multiplying:
    """The context of a plain kernel whose products have scales; everything else is the context's own."""

    def __init__(self, context: Context, product: ScaledProduct | DeepGemm) -> None:
        self._context, self._product = context, product

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def matmul(self, a: Factor, b: Factor, out: Tensor) -> None:
        """out = A @ B.T."""
        self._product(a.codes, a.scales, b.codes, b.scales, out)


class Scaled(Kernel[GemmReduceScatter]):
    """A plain kernel with products of e4m3. A call takes A, B, A's scales unless it makes them, B's scales, C, bias, residual."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        product = ScaledProduct(problem, config, problem.m, context)
        self.quantised = Quantiser(problem, problem.m, context)
        super().__init__(plain(problem), config, Multiplying(context, product))  # type: ignore[arg-type]
        self.problem = problem

    def __call__(self, a: Tensor, b: Tensor, *rest: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> Any:
        of_a, scales_b, out = rest[:-2], rest[-2], rest[-1]
        more = () if bias is None and residual is None else (bias, residual)
        codes = self.quantised(a, of_a[0] if of_a else None)
        return super().__call__(Factor(*codes), Factor(b, scales_b), out, *more)  # type: ignore[safe-super]

    def product(self, a: Tensor, b: Tensor, *rest: Any) -> None:
        """This rank's addend in place of the sum."""
        *of_a, scales_b, out = rest
        codes = self.quantised(a, of_a[0] if of_a else None)
        self.context.matmul(Factor(*codes), Factor(b, scales_b), out)  # type: ignore[arg-type]
