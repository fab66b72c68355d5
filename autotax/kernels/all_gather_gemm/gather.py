"""The gathering that goes with products by the vendor's library: who writes, who waits, and when a slot is free again.

The library is given addresses when a call is captured, so the host chooses the slot of the inbox: the two in turn. A graph
may hold an odd number of calls and use one slot twice running, so no parity is relied upon: the control block knows which
call used a slot last, and `begun` flags, which each rank raises when it begins a call, tell that its peers have finished the
one before. With slots that do alternate they have been up for a whole call, and nobody waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autotax.kernels.primitives import (
    AWAITED,
    EPOCH,
    SLOT_USED,
    copy,
    copy_block,
    flag_address,
    leave,
    signal,
    signal_all,
    translate,
    wait,
)

COPY_ELEMENTS = tl.constexpr(8192)
"""Elements that a program moves at a time: 16 KiB of bf16, the least that keeps a link busy from few programs."""
PART_ALIGNMENT = tl.constexpr(1024)
"""Elements by which the parts of programs are aligned."""


@triton.jit
def announce(begun, bases, rank, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """Tells the peers that this rank has finished all calls before this one."""
    signal_all(begun, rank, bases, rank, WORLD, False, TARGET)


@triton.jit
def await_slot(begun, control, slot, rank, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """Waits until all peers have finished the call that used this slot last."""
    goal = tl.load(control + SLOT_USED + slot) + 1
    for hop in tl.range(1, WORLD, num_stages=1):
        peer = (rank + hop) % WORLD
        wait(begun + peer, goal, peer, peer, control, TARGET)


@triton.jit
def copy_part(
    landing, a, program, rows, cols, SHARD_K: tl.constexpr, WORLD: tl.constexpr, COMM: tl.constexpr,
    COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copies one of COMM parts of the shard [rows, cols]: with SHARD_K whole rows, into rows WORLD times as long."""
    if SHARD_K:
        height = tl.cdiv(rows, COMM)
        first = program * height
        copy_block(
            landing, a, first, tl.minimum(first + height, rows), 0, cols, WORLD * cols, cols,
            COPY_ELEMENTS // COPY_COLS, COPY_COLS, ALIGNED,
        )  # fmt: skip
    else:
        size = rows * tl.cast(cols, tl.int64)
        length = tl.cdiv(size, COMM * PART_ALIGNMENT) * PART_ALIGNMENT
        first = program * length
        copy(landing, a, first, tl.minimum(first + length, size), COPY_ELEMENTS, ALIGNED)


@triton.jit(do_not_specialize=["rank", "slot"])
def push_gather(
    a, inbox, bases, arrived, begun, control, rank, slot, rows, cols,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, WHOLE: tl.constexpr, COMM: tl.constexpr,
    COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Each of the first COMM programs writes its part of the own shard into the inbox of every peer, then signals that peer.

    The inbox is [WORLD, rows, cols], with SHARD_K [rows, WORLD, cols]. With WHOLE the own shard is copied into the own inbox
    too, and one more program waits for all the others', so that the kernel ends when A is complete.
    """
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0)
    landing = inbox + rank * (cols if SHARD_K else rows * tl.cast(cols, tl.int64))
    if program == 0:
        announce(begun, bases, rank, WORLD, TARGET)
    if program < COMM:
        await_slot(begun, control, slot, rank, WORLD, TARGET)
        for hop in tl.range(1, WORLD, num_stages=1):
            peer = (rank + hop) % WORLD
            copy_part(translate(landing, bases, rank, peer), a, program, rows, cols, SHARD_K, WORLD, COMM, COPY_COLS, ALIGNED)
            signal(flag_address(arrived, rank, bases, rank, peer), 1, TARGET)
        if WHOLE:
            copy_part(landing, a, program, rows, cols, SHARD_K, WORLD, COMM, COPY_COLS, ALIGNED)
    else:
        for hop in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - hop) % WORLD
            wait(arrived + source, epoch * COMM, source, source, control, TARGET)
    # Nobody reads the word of the slot any more once all have left.
    if leave(control, epoch, tl.num_programs(0)):
        tl.store(control + SLOT_USED + slot, epoch)


@triton.jit(do_not_specialize=["rank", "slot"])
def open_slot(ticket, bases, begun, control, rank, slot, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """For copy engines, one program: waits until the slot is free at all peers, then writes the epoch into the ticket."""
    epoch = tl.load(control + EPOCH)
    announce(begun, bases, rank, WORLD, TARGET)
    await_slot(begun, control, slot, rank, WORLD, TARGET)
    tl.store(ticket, epoch)
    tl.store(control + SLOT_USED + slot, epoch)
    tl.store(control + EPOCH, epoch + 1)


@triton.jit(do_not_specialize=["rank", "first", "last"])
def await_shards(
    arrived, control, rank, first, last, signals, LAST: tl.constexpr, WORLD: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """One program: waits for the shards that arrive over hops first ... last - 1; `LAST` says that these are a call's last.

    It counts calls by itself: the kernel that sends may not have begun yet, or may have ended already.
    """
    call = tl.load(control + AWAITED) + 1
    for hop in tl.range(first, last, num_stages=1):
        source = (rank + WORLD - hop) % WORLD
        wait(arrived + source, call * signals, source, source, control, TARGET)
    if LAST:
        tl.store(control + AWAITED, call)
