"""Gathers A in e4m3 with its scales, and quantises it on the way if the caller's A has 16 bits.

Bytes and scales of a shard travel by one kernel and have one flag; `push_gather` describes slots, flags and waits. Bytes move as
16-bit words. The scales of rows lie as [m, 1]. Those of blocks lie group by group: for one product as [groups, m], else as [source,
groups, rows of a shard], so that each shard's scales have the strides that the vendor's product wants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autotax.kernels.all_gather_gemm.push_gather import announce, await_slot, spread_part
from autotax.kernels.primitives import ALL_BEGUN, EPOCH, SLOT_USED, leave, signal_all, translate, wait
from autotax.kernels.quantise import quantise

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
