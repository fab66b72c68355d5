"""Gathers A for the vendor's GEMM: the kernels that send and wait, and the rule that frees a slot of the inbox.

The library gets its addresses when a call is captured, so the host chooses the slot of the inbox: the two in turn. A graph may
use one slot twice in a row, so nothing relies on parity. The control block records which call used a slot last. Each rank raises
`begun` flags when it begins a call; they tell its peers that it has finished the previous call. If slots do alternate, nobody
waits for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autotax.kernels.all_gather_gemm.scaled_shards import spread_quantised
from autotax.kernels.primitives import ALL_BEGUN, AWAITED, EPOCH, SLOT_USED, leave, signal_all, translate, wait

COPY_ELEMENTS = tl.constexpr(16384)
"""Elements that a program moves at a time: 32 KiB of bf16 in flight, so that few programs keep the links busy."""
WARM_COLS = tl.constexpr(1024)
"""Columns of B that are loaded into the L2 at a time."""
PART_ALIGNMENT = tl.constexpr(1024)
"""The parts of programs are aligned to this many elements."""


@triton.jit
def announce(begun, bases, rank, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """Signals to the peers that this rank has finished all calls before this one."""
    signal_all(begun, rank, bases, rank, WORLD, False, TARGET)


@triton.jit
def await_slot(begun, control, slot, peer, TARGET: tl.constexpr):
    """Waits until a peer has finished the call that used this slot last."""
    wait(begun + peer, tl.load(control + SLOT_USED + slot) + 1, peer, peer, control, TARGET)


@triton.jit
def spread(
    landing, source, row, row_end, col, col_end, stride_there, stride, bases, rank,
    WORLD: tl.constexpr, SELF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """landing[row:row_end, col:col_end] = source[...] on every other rank, and with SELF also on this rank.

    Both are row-major; columns and strides are multiples of ALIGNED. Each block is loaded once, whatever the number of ranks.
    """
    size: tl.constexpr = source.dtype.element_ty.primitive_bitwidth // 8
    col_end = tl.multiple_of(col_end, ALIGNED)
    for r in range(row, row_end, ROWS):
        for c in range(col, col_end, COLS):
            rows = (r + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            cols = (tl.multiple_of(c, ALIGNED) + tl.arange(0, COLS))[None, :]
            inside = (rows < row_end) & (cols < col_end)
            block = tl.load(source + rows * stride + cols, mask=inside)
            for hop in tl.static_range(1, WORLD + SELF):
                addresses = translate(landing, bases, rank, (rank + hop) % WORLD) + rows * stride_there + cols
                # A translated base comes from an integer. Without the alignment hint its stores would be two bytes wide.
                tl.store(tl.multiple_of(addresses, (size, ALIGNED * size)), block, mask=inside)


@triton.jit
def warm(b, rows, cols, stride, program, programs, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Loads the first `cols` columns (a multiple of COLS) of a row-major matrix into the L2. Each of `programs`
    programs loads a part. Prefetch instructions do not work here: the hardware drops most of them.
    """
    for first in range(program * ROWS, rows, programs * ROWS):
        for col in range(0, cols, COLS):
            row = first + tl.arange(0, ROWS)
            addresses = b + row.to(tl.int64)[:, None] * stride + col + tl.arange(0, COLS)[None, :]
            tl.load(addresses, mask=(row < rows)[:, None], volatile=True)  # volatile, else the compiler drops the unused load


@triton.jit
def spread_part(
    landing, a, program, rows, cols, bases, rank, WORLD: tl.constexpr, SHARD_K: tl.constexpr, WHOLE: tl.constexpr,
    COMM: tl.constexpr, COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Writes one of COMM parts of the shard [rows, cols] to all peers. With SHARD_K rows go into rows WORLD times longer."""
    if SHARD_K:
        height = tl.cdiv(rows, COMM)
        row = program * height
        spread(
            landing, a, row, tl.minimum(row + height, rows), 0, cols, WORLD * cols, cols, bases, rank,
            WORLD, WHOLE, COPY_ELEMENTS // COPY_COLS, COPY_COLS, ALIGNED,
        )  # fmt: skip
    else:
        size = rows * tl.cast(cols, tl.int64)
        length = tl.cdiv(size, COMM * PART_ALIGNMENT) * PART_ALIGNMENT
        at = program * length
        end = tl.minimum(at + length, size)
        spread(landing, a, 0, 1, at, end, size, size, bases, rank, WORLD, WHOLE, 1, COPY_ELEMENTS, ALIGNED)


@triton.jit(do_not_specialize=["rank", "slot"])
def push_gather(
    a, inbox, b, bases, arrived, begun, control, rank, slot, rows, cols, n, k, warm_cols,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, WHOLE: tl.constexpr, COMM: tl.constexpr,
    COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Sends this rank's shard to all peers. The first program signals that the call has begun. Each of the next COMM
    programs writes its part of the shard into the inbox of every peer, and signals once.

    The inbox is [WORLD, rows, cols], with SHARD_K [rows, WORLD, cols]. With WHOLE this rank's shard is also copied
    into its own inbox. Then WORLD - 1 more programs wait for one shard each, so that the kernel ends when A is
    complete. The programs after these load the first `warm_cols` columns of B [n, k] into the L2.
    """
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0) - 1
    landing = inbox + rank * (cols if SHARD_K else rows * tl.cast(cols, tl.int64))
    if program < 0:
        announce(begun, bases, rank, WORLD, TARGET)
    elif program < COMM:
        if tl.load(control + ALL_BEGUN) - tl.load(control + SLOT_USED + slot) <= 0:
            for hop in tl.range(1, WORLD, num_stages=1):
                await_slot(begun, control, slot, (rank + hop) % WORLD, TARGET)
        spread_part(landing, a, program, rows, cols, bases, rank, WORLD, SHARD_K, WHOLE, COMM, COPY_COLS, ALIGNED)
        signal_all(arrived, rank, bases, rank, WORLD, False, TARGET)
    elif program < COMM + WORLD - 1:
        source = (rank + 2 * WORLD - 1 - (program - COMM)) % WORLD
        wait(arrived + source, epoch * COMM, source, source, control, TARGET)
    else:
        idle = COMM + WORLD - 1
        warm(b, n, warm_cols, k, program - idle, tl.num_programs(0) - 1 - idle, COPY_ELEMENTS // WARM_COLS, WARM_COLS)
    if leave(control, epoch, tl.num_programs(0), TARGET):  # once all programs have left, nobody reads these words
        tl.store(control + SLOT_USED + slot, epoch)
        if WHOLE:  # together the programs have waited for every peer
            tl.store(control + ALL_BEGUN, epoch)


@triton.jit(do_not_specialize=["rank", "slot"])
def open_slot(ticket, bases, begun, control, rank, slot, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """For copy engines, one program: waits until the slot is free at all peers, then writes the epoch into the ticket."""
    epoch = tl.load(control + EPOCH)
    announce(begun, bases, rank, WORLD, TARGET)
    for hop in tl.range(1, WORLD, num_stages=1):
        await_slot(begun, control, slot, (rank + hop) % WORLD, TARGET)
    tl.store(ticket, epoch)
    tl.store(control + SLOT_USED + slot, epoch)
    tl.store(control + EPOCH, epoch + 1)


@triton.jit(do_not_specialize=["rank", "hop", "hops"])
def await_shards(arrived, control, rank, hop, hops, signals, LAST: tl.constexpr, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """One program: waits for the shards that arrive over hops hop ... hops - 1. `LAST` marks the last wait of a call.

    The kernel counts calls by itself, because the sending kernel may not have begun yet, or may have ended already.
    """
    call = tl.load(control + AWAITED) + 1
    for step in tl.range(hop, hops, num_stages=1):
        source = (rank + WORLD - step) % WORLD
        wait(arrived + source, call * signals, source, source, control, TARGET)
    if LAST:
        tl.store(control + AWAITED, call)


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
        place = rank * source_stride + at // rows * group_stride + at % rows
        for hop in tl.static_range(1, WORLD + SELF):
            tl.store(translate(inbox, bases, rank, (rank + hop) % WORLD) + place, held, mask=at < size)


@triton.jit(do_not_specialize=["rank", "slot"])
def push_scaled(
    a, scales, most, inbox, scale_inbox, bases, arrived, begun, control, rank, slot, rows, cols, groups, source_stride, group_stride,
    WORLD: tl.constexpr, WHOLE: tl.constexpr, COMM: tl.constexpr, QUANT: tl.constexpr, COLS: tl.constexpr, COPY_COLS: tl.constexpr,
    ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`push_gather` for the bytes and scales of a shard in e4m3, which have one flag. It quantises unless QUANT is "none".

    The scales of blocks lie group by group: for one product as [groups, m], else as [source, groups, rows of a shard], so that
    each shard's scales have the strides that the vendor's product wants. With QUANT "none" `a` and `inbox` are 16-bit words,
    `cols` of them a row; else `a` are numbers, `inbox` bytes, and `cols` their number a row. `groups` is the number of scales a
    row, 0 where none is sent.
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
                a, scales, most, inbox, scale_inbox, program, COMM, rows, groups, source_stride, group_stride, cols, bases, rank,
                WORLD, WHOLE, QUANT, COLS, TARGET,
            )  # fmt: skip
        signal_all(arrived, rank, bases, rank, WORLD, False, TARGET)
    else:
        source = (rank + 2 * WORLD - 1 - (program - COMM)) % WORLD
        wait(arrived + source, epoch * COMM, source, source, control, TARGET)
    if leave(control, epoch, tl.num_programs(0), TARGET):  # once all programs have left, nobody reads these words
        tl.store(control + SLOT_USED + slot, epoch)
        if WHOLE:  # together the programs have waited for every peer
            tl.store(control + ALL_BEGUN, epoch)
