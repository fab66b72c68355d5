"""The base of kernels for e4m3: the arguments of a call, the scales of all of A, and quantisation of an A that has 16 bits."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context, gdc_launch_dependents, gdc_wait, overlapping
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import translate
from autotax.kernels.scaled_product import GROUP as GROUP_COLS
from autotax.kernels.scaled_product import quantise
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.scaled import GROUP, SCALES_OF


@triton.jit
def spread_quantised(
    a, static, most, inbox, scale_inbox, program, programs, rows, groups, source_stride, group_stride, k, bases, rank,
    WORLD: tl.constexpr, SELF: tl.constexpr, QUANT: tl.constexpr, COLS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Quantises this program's rows of a shard [rows, k], one of `programs`, and writes its bytes and scales like `spread_part` and `spread_scales`.

    `inbox` are bytes [WORLD, rows, k]. COLS is a power of two, not below k.
    """
    # Groups of 128 have scales and rows of a tile of their own, so that a few lanes find the largest number of each.
    if QUANT == "block":
        group = tl.arange(0, COLS // GROUP_COLS)
        col = group[:, None] * GROUP_COLS + tl.arange(0, GROUP_COLS)[None, :]
    else:
        col = tl.arange(0, COLS)[None, :]
    one = tl.load(static) if QUANT == "tensor" else 1.0
    first = rank * (rows * tl.cast(k, tl.int64))
    for row in range(program, rows, programs):
        values = tl.load(a + row * tl.cast(k, tl.int64) + col, mask=col < k, other=0.0).to(tl.float32)
        codes, scales = quantise(values, one, most, QUANT, TARGET)
        bytes_at = first + row * tl.cast(k, tl.int64) + tl.multiple_of(col, (1, 16))
        for hop in tl.static_range(1, WORLD + SELF):
            peer = (rank + hop) % WORLD
            addresses = tl.multiple_of(translate(inbox, bases, rank, peer) + bytes_at, (1, 16))
            tl.store(addresses, codes, mask=col < k)
            at = translate(scale_inbox, bases, rank, peer) + rank * source_stride + row
            if QUANT == "row":
                tl.store(at + tl.arange(0, 1), scales)
            elif QUANT == "block":
                tl.store(at + group * group_stride, scales, mask=group < groups)


@triton.jit
def quantise_kernel(
    a, static, most, codes, scales, bases, rows, groups, k,
    QUANT: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Quantises A [rows, k] on this rank alone, a row a program: bytes [rows, k], scales [groups, rows]. `bases` are two zeros.

    With EARLY the launch may begin while the kernel before it ends, and the kernel behind it while this one runs.
    """
    row = tl.program_id(0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    spread_quantised(a, static, most, codes, scales, row, rows, rows, groups, 0, rows, k, bases, 0, 1, True, QUANT, COLS, TARGET)


CODES = torch.float8_e4m3fn


def codes_of(problem: Any) -> torch.dtype:
    """The type of A as it is multiplied."""
    return torch.float8_e5m2 if problem.operand == "e5m2" else CODES


class Quantiser:
    """Quantises `rows` rows of A or fewer on their own rank, if the problem says so.

    `groups` are the scales of a row that travel with it. `quant` is "none", or the scales that quantising makes or takes.
    """

    def __init__(self, problem: Any, rows: int, context: Context) -> None:
        self.problem, self.context = problem, context
        self.groups = {"tensor": 0, "row": 1, "block": ceil_div(problem.k, GROUP)}[problem.scales]
        self.quant = SCALES_OF.get(problem.quantize, "none")
        self.columns = power_of_two(max(problem.k, GROUP))
        self.most = math.inf
        self.overlapping = overlapping(context.hardware)
        if self.quant != "none":
            self.codes = context.empty((rows, problem.k), CODES)
            self.scales = context.empty((max(1, self.groups) * rows,), torch.float32)
            self.nowhere = context.empty((2,), torch.int64).zero_()

    def static(self, scales_a: Tensor | None) -> Tensor:
        """The scale of quantize `static`; another tensor of its type stands for a missing one."""
        return self.scales if scales_a is None else scales_a

    def __call__(self, a: Tensor, scales_a: Tensor | None) -> tuple[Tensor, Tensor]:
        """A in e4m3 and its scales, for an A in either form. `scales_a` is None where the call makes them."""
        if self.quant == "none":
            assert scales_a is not None
            return a, scales_a
        rows = len(a)
        scales = self.scales[: max(1, self.groups) * rows].view(-1, rows)
        self.context.launch(
            quantise_kernel, (rows,), a, self.static(scales_a), self.most, self.codes.view(torch.uint8), scales,
            self.nowhere, rows, self.groups, self.problem.k,
            QUANT=self.quant, COLS=self.columns, num_warps=8, **self.overlapping,
        )  # fmt: skip
        return self.codes[:rows], self.static(scales_a) if self.quant == "tensor" else scales.t()


class Scaled(Kernel[AllGatherGemm]):
    """A kernel for e4m3. Tensors of a call: A, B, the scales of A unless a call makes them, the scales of B, C."""

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
