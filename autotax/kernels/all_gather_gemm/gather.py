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
    ALL_BEGUN,
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
def await_slot(begun, control, slot, peer, TARGET: tl.constexpr):
    """Waits until a peer has finished the call that used this slot last."""
    wait(begun + peer, tl.load(control + SLOT_USED + slot) + 1, peer, peer, control, TARGET)


@triton.jit
def copy_part(
    landing, a, program, rows, cols,
    SHARD_K: tl.constexpr, WORLD: tl.constexpr, COMM: tl.constexpr, COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copies one of COMM parts of the shard [rows, cols]: with SHARD_K whole rows, into rows WORLD times as long."""
    if SHARD_K:
        height = tl.cdiv(rows, COMM)
        row = program * height
        copy_block(
            landing, a, row, tl.minimum(row + height, rows), 0, cols, WORLD * cols, cols,
            COPY_ELEMENTS // COPY_COLS, COPY_COLS, ALIGNED,
        )  # fmt: skip
    else:
        size = rows * tl.cast(cols, tl.int64)
        length = tl.cdiv(size, COMM * PART_ALIGNMENT) * PART_ALIGNMENT
        at = program * length
        copy(landing, a, at, tl.minimum(at + length, size), COPY_ELEMENTS, ALIGNED)


@triton.jit(do_not_specialize=["rank", "slot"])
def push_gather(
    a, inbox, bases, arrived, begun, control, rank, slot, rows, cols,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, WHOLE: tl.constexpr, COMM: tl.constexpr,
    COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Each of the first COMM programs writes its part of the own shard into the inbox of every peer, with one signal.

    The inbox is [WORLD, rows, cols], with SHARD_K [rows, WORLD, cols]. With WHOLE the own shard is copied into the own inbox
    too, and one more program waits for the others' shards, so that the kernel ends when A is complete.
    """
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0)
    landing = inbox + rank * (cols if SHARD_K else rows * tl.cast(cols, tl.int64))
    if program == 0:
        announce(begun, bases, rank, WORLD, TARGET)
    if program < COMM:
        if WHOLE:  # one fence for all peers: whoever waits, waits for everything
            copy_part(landing, a, program, rows, cols, SHARD_K, WORLD, COMM, COPY_COLS, ALIGNED)
            for hop in tl.range(1, WORLD, num_stages=1):
                peer = (rank + hop) % WORLD
                if tl.load(control + ALL_BEGUN) - tl.load(control + SLOT_USED + slot) <= 0:
                    await_slot(begun, control, slot, peer, TARGET)
                there = translate(landing, bases, rank, peer)
                copy_part(there, a, program, rows, cols, SHARD_K, WORLD, COMM, COPY_COLS, ALIGNED)
            signal_all(arrived, rank, bases, rank, WORLD, False, TARGET)
        else:
            for hop in tl.range(1, WORLD, num_stages=1):
                peer = (rank + hop) % WORLD
                await_slot(begun, control, slot, peer, TARGET)
                there = translate(landing, bases, rank, peer)
                copy_part(there, a, program, rows, cols, SHARD_K, WORLD, COMM, COPY_COLS, ALIGNED)
                signal(flag_address(arrived, rank, bases, rank, peer), 1, TARGET)
    else:
        for hop in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - hop) % WORLD
            wait(arrived + source, epoch * COMM, source, source, control, TARGET)
    if leave(control, epoch, tl.num_programs(0)):  # nobody reads these words any more once all have left
        tl.store(control + SLOT_USED + slot, epoch)
        if WHOLE:  # one of them has waited for everybody
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
def await_shards(
    arrived, control, rank, hop, hops, signals, LAST: tl.constexpr, WORLD: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """One program: waits for the shards that arrive over hops hop ... hops - 1. `LAST` says that these are a call's last.

    It counts calls by itself: the kernel that sends may not have begun yet, or may have ended already.
    """
    call = tl.load(control + AWAITED) + 1
    for step in tl.range(hop, hops, num_stages=1):
        source = (rank + WORLD - step) % WORLD
        wait(arrived + source, call * signals, source, source, control, TARGET)
    if LAST:
        tl.store(control + AWAITED, call)
