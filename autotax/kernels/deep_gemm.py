"""The product of DeepGEMM, where it is installed, for scales of blocks and C in bf16."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from autotax.kernels.context import Context


class DeepGemm:
    """Replaces a `ScaledProduct`. Version 2 of DeepGEMM renamed the function. Raises ImportError where it cannot be imported."""

    def __init__(self, context: Context) -> None:
        deep_gemm = import_module("deep_gemm")
        self.context = context
        self.multiply: Any = getattr(deep_gemm, "fp8_gemm_nt", None) or deep_gemm.gemm_fp8_fp8_bf16_nt

    def __call__(self, a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """See ScaledProduct.__call__."""
        if not self.context.dry:
            self.multiply((a, scales_a), (b, scales_b), out)
