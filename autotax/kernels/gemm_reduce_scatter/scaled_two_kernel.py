"""scaled_two_kernel: `two_kernel` with a product of e4m3."""

from __future__ import annotations

from autotax.kernels.gemm_reduce_scatter.scaled_sums import Scaled
from autotax.kernels.gemm_reduce_scatter.two_kernel import TwoKernel


class ScaledTwoKernel(Scaled, TwoKernel):
    """See TwoKernel."""
