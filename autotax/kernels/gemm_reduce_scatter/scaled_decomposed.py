"""scaled_decomposed: `decomposed` with products of e4m3."""

from __future__ import annotations

from autotax.kernels.gemm_reduce_scatter.decomposed import Decomposed
from autotax.kernels.gemm_reduce_scatter.scaled_sums import Scaled


class ScaledDecomposed(Scaled, Decomposed):
    """See Decomposed."""
