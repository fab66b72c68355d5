"""Gathers A in e4m3 with its scales, and quantises it on the way if the caller's A has 16 bits.

Bytes and scales of a shard travel by one kernel and have one flag; `push_gather` describes slots, flags and waits. Bytes move as
16-bit words. The scales of rows lie as [m, 1]. The scales of blocks lie group by group: for one product as [groups, m], else as [source,
groups, rows of a shard], so that each shard's scales have the strides that the vendor's product wants.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_gather_gemm.push_gather import announce, await_slot, spread_part
from autotax.kernels.context import Context
from autotax.kernels.primitives import ALL_BEGUN, EPOCH, SLOT_USED, leave, signal_all, translate, wait
from autotax.kernels.scaled_product import quantise
from autotax.operators.scaled import GROUP, SCALES_OF

SCALES_AT_ONCE = tl.constexpr(1024)
"""Scales that a program moves at a time."""


@triton.jit
def spread_scales(
    inbox, scales, program, rows, groups, source_stride, group_stride, bases, rank,
    WORLD: tl.constexpr, SELF: tl.constexpr, COMM: tl.constexpr,
):  # fmt: skip
    """Writes one of COMM parts of the scales [groups, rows] to every other rank, and with SELF also to this rank.

    The scale of row r, group g and this rank lies at inbox + rank * source_stride + g * group_stride + r.
    """
    size = rows * groups
    for first in range(program * SCALES_AT_ONCE, size, COMM * SCALES_AT_ONCE):
        at = first + tl.arange(0, SCALES_AT_ONCE)
        held = tl.load(scales + at, mask=at < size)
        there = rank * source_stride + at // rows * group_stride + at % rows
        for hop in tl.static_range(1, WORLD + SELF):
            tl.store(translate(inbox, bases, rank, (rank + hop) % WORLD) + there, held, mask=at < size)


@triton.jit
def spread_quantised(
    a, static, most, inbox, scale_inbox, program, rows, groups, source_stride, group_stride, k, bases, rank,
    WORLD: tl.constexpr, SELF: tl.constexpr, COMM: tl.constexpr, QUANT: tl.constexpr, COLS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Quantises every COMM-th row of a shard [rows, k] and writes its bytes and scales like `spread_part` and `spread_scales`.

    `inbox` are bytes [WORLD, rows, k]. COLS is a power of two, not below k.
    """
    col = tl.arange(0, COLS)
    one = tl.load(static) if QUANT == "tensor" else 1.0
    first = rank * (rows * tl.cast(k, tl.int64))
    for row in range(program, rows, COMM):
        values = tl.load(a + row * tl.cast(k, tl.int64) + col, mask=col < k, other=0.0).to(tl.float32)
        codes, scales = quantise(values[None, :], one, most, QUANT, TARGET)
        bytes_at = first + row * tl.cast(k, tl.int64) + tl.multiple_of(col, (16,))
        for hop in tl.static_range(1, WORLD + SELF):
            peer = (rank + hop) % WORLD
            there = tl.multiple_of(translate(inbox, bases, rank, peer) + bytes_at, (16,))
            tl.store(there, tl.reshape(codes, [COLS]), mask=col < k)
            at = translate(scale_inbox, bases, rank, peer) + rank * source_stride + row
            if QUANT == "row":
                tl.store(at + tl.arange(0, 1), scales)
            elif QUANT == "block":
                group = tl.arange(0, COLS // 128)
                tl.store(at + group * group_stride, tl.reshape(scales, [COLS // 128]), mask=group < groups)


@triton.jit(do_not_specialize=["rank", "slot"])
def push_scaled(
    a, scales, most, inbox, scale_inbox, bases, arrived, begun, control, rank, slot, rows, cols, groups, source_stride, group_stride,
    WORLD: tl.constexpr, WHOLE: tl.constexpr, COMM: tl.constexpr, QUANT: tl.constexpr, COLS: tl.constexpr, COPY_COLS: tl.constexpr,
    ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`push_gather` for bytes and scales. With QUANT "none" `a` and `inbox` are 16-bit words, `cols` of them a row; else `a` are
    numbers, `inbox` bytes, and `cols` their number a row. `groups` is the number of scales a row, 0 where none is sent.
    """
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0) - 1
    if program < 0:
        announce(begun, bases, rank, WORLD, TARGET)
    elif program < COMM:
        if tl.load(control + ALL_BEGUN) - tl.load(control + SLOT_USED + slot) <= 0:
            for hop in tl.range(1, WORLD, num_stages=1):
                await_slot(begun, control, slot, (rank + hop) % WORLD, TARGET)
        if QUANT == "none":
            landing = inbox + rank * (rows * tl.cast(cols, tl.int64))
            spread_part(landing, a, program, rows, cols, bases, rank, WORLD, False, WHOLE, COMM, COPY_COLS, ALIGNED)
            spread_scales(scale_inbox, scales, program, rows, groups, source_stride, group_stride, bases, rank, WORLD, WHOLE, COMM)
        else:
            spread_quantised(
                a, scales, most, inbox, scale_inbox, program, rows, groups, source_stride, group_stride, cols, bases, rank,
                WORLD, WHOLE, COMM, QUANT, COLS, TARGET,
            )  # fmt: skip
        signal_all(arrived, rank, bases, rank, WORLD, False, TARGET)
    else:
        source = (rank + 2 * WORLD - 1 - (program - COMM)) % WORLD
        wait(arrived + source, epoch * COMM, source, source, control, TARGET)
    if leave(control, epoch, tl.num_programs(0), TARGET):  # once all programs have left, nobody reads these words
        tl.store(control + SLOT_USED + slot, epoch)
        if WHOLE:  # together the programs have waited for every peer
            tl.store(control + ALL_BEGUN, epoch)


@triton.jit
def quantise_kernel(
    a, static, most, codes, scales, bases, rows, groups, k, QUANT: tl.constexpr, PROGRAMS: tl.constexpr, COLS: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Quantises A [rows, k] on this rank alone: bytes [rows, k], scales [groups, rows]. `bases` are two zeros."""
    spread_quantised(
        a, static, most, codes, scales, tl.program_id(0), rows, groups, 0, rows, k, bases, 0, 1, True, PROGRAMS, QUANT, COLS, TARGET
    )


CODES = torch.float8_e4m3fn


def codes_of(problem: Any) -> torch.dtype:
    """The type of A as it is multiplied."""
    return torch.float8_e5m2 if problem.operand == "e5m2" else CODES


QUANTISING_PROGRAMS = 264
"""Programs that quantise on their own rank: two for each processor of an H100."""


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
        rows, programs = len(a), min(len(a), QUANTISING_PROGRAMS)
        scales = self.scales[: max(1, self.groups) * rows].view(-1, rows)
        self.context.launch(
            quantise_kernel, (programs,), a, self.static(scales_a), self.most, self.codes.view(torch.uint8), scales, self.nowhere, rows,
            self.groups, self.problem.k, QUANT=self.quant, PROGRAMS=programs, COLS=self.columns, num_warps=8,
        )  # fmt: skip
        return self.codes[:rows], self.static(scales_a) if self.quant == "tensor" else scales.t()
