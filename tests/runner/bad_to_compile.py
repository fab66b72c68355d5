"""Variants that are bad for a compiler, or for a GPU: a plugin for tests of compiling."""

from __future__ import annotations

import os
import time

import triton
import triton.language as tl
from torch import Tensor

from autotax.kernels.kernel import Kernel
from autotax.operators import named
from autotax.operators.problems import AllGatherGemm


@triton.jit
def nonsense(control, TARGET: tl.constexpr):  # noqa: ARG001 - every launch gives it
    tl.store(control, tl.zeros([3], tl.int32))  # 3 is no power of two


@triton.jit
def crowded(control, TARGET: tl.constexpr):  # noqa: ARG001 - every launch gives it
    """Eight warps hold 256 words a thread over a barrier, where a thread has 255 registers."""
    words = control + tl.arange(0, 65536)
    loaded = tl.load(words)
    tl.debug_barrier()
    tl.store(words, loaded + 1)


class DoesNotCompile(Kernel[AllGatherGemm]):
    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.context.launch(nonsense, (1,), self.control)


class Spills(Kernel[AllGatherGemm]):
    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.context.launch(crowded, (1,), self.control, num_warps=8)


class Aborts(Kernel[AllGatherGemm]):
    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        os.abort()


class NeverEnds(Kernel[AllGatherGemm]):
    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        time.sleep(10_000)


named("all-gather-gemm").peer("does_not_compile", DoesNotCompile)
named("all-gather-gemm").peer("spills", Spills)
named("all-gather-gemm").peer("aborts", Aborts)
named("all-gather-gemm").peer("never_ends", NeverEnds)
