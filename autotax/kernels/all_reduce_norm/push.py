"""push: one kernel for many rows. Rows are sent unchanged, by plain stores, in blocks; a flag follows each block.

With TWO shots each rank owns some blocks: it adds them up and sends the new residual to all ranks, and every rank normalises all
rows. `tiling.owner_of` says who owns a block. With TURNED all programs add up some of a rank's blocks. Without it few programs may
add up all of them.

With one shot every rank sends all its blocks to all ranks, and each adds up all of them. For two ranks that is the same number of
bytes, in one trip.

In turn j a program sends its block j, adds up its block j - AHEAD, and normalises its block j - 2 AHEAD if another rank added
that up. So links and memory are busy at the same time. A flag is set when its data are stored, or with LATE at the end of the
turn. By then most stores have arrived at the peer, so the release waits only for a short time.

In turn j a program waits for work that peers do in turns before j, or in turn j before they wait (never with LATE). All programs
are resident at the same time, because the launch is cooperative. A flag of a block and a source holds the number of the last call
that filled the block. The parity of the call selects one of two slots; see `docs/memory-model.md`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.all_reduce_norm.norm import NormKernel, finish, given_factor
from autotax.kernels.context import Context, gdc_wait, together
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.primitives import arithmetic, copy, flag_address, settle, translate, wait, write_back
from autotax.operators.all_reduce_norm import AllReduceNorm


@triton.jit
def announce(flag, epoch, TARGET: tl.constexpr):
    """Sets a flag of a peer to the number of the call; a peer that reads the number sees all earlier stores of this program."""
    settle(TARGET)
    if TARGET == "hip":
        write_back("sys")
        tl.atomic_xchg(flag, epoch, sem="relaxed", scope="sys")
    else:
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def sum_of_row(x, residual, box, row, place, size, cols, rank, WORLD: tl.constexpr, HIDDEN: tl.constexpr, ADDED: tl.constexpr):
    """Adds up a row of all ranks, in rank order, and the residual in float32. `box` holds [source, size] elements; the source at
    hop h has index h - 1. The row has number `place` in it.
    """
    inside = cols < HIDDEN
    at = tl.cast(row, tl.int64) * HIDDEN + cols
    own = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    total = own
    for source in tl.static_range(WORLD):
        behind = (rank + WORLD - 1 - source) % WORLD  # hops from the source to this rank, minus one
        addresses = box + behind * size + tl.cast(place, tl.int64) * HIDDEN + cols
        part = tl.load(addresses, mask=inside & (source != rank), other=0).to(tl.float32)
        part = tl.where(source == rank, own, part)
        if source == 0:
            total = part
        else:
            total += part
    if ADDED:
        total += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    return total


owner_of = arithmetic(tiling.owner_of)


@triton.jit(do_not_specialize=["rank", "m", "eps"])
def push_kernel(
    x, residual, weight, new_residual, y, scales, box, sums, flags, sum_flags, bases, control, state, rank, m, eps, room, blocks_most,
    WORLD: tl.constexpr, TWO: tl.constexpr, TURNED: tl.constexpr, LATE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`box` is [2, hop, room rows, HIDDEN], `sums` [2, rows, HIDDEN]; `flags` int32 [source, blocks_most], `sum_flags`
    [blocks_most]; `state` int32 [programs] is the number of the call. A block has ROWS rows.
    """
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(state + program)
    static_factor = given_factor(scales, QUANT)
    slot = (epoch & 1).to(tl.int64)
    blocks = tl.cdiv(m, ROWS)
    turns = tl.cdiv(blocks - program, programs)
    size = tl.cast(room, tl.int64) * HIDDEN
    mine = box + slot * (WORLD - 1) * size
    sum_rows = slot * blocks_most * ROWS
    cols = tl.arange(0, COLS)
    factors = tl.load(weight + cols, mask=cols < HIDDEN, other=0).to(tl.float32)
    for turn in tl.range(0, turns + (2 * AHEAD if TWO else AHEAD), num_stages=1):
        block = turn * programs + program
        owner = owner_of(block, programs, WORLD, TURNED)
        if block < blocks:
            first = block * ROWS
            end = tl.minimum(first + ROWS, m)
            for hop in tl.static_range(1, WORLD):
                peer = (rank + hop) % WORLD
                place = first
                if TWO:
                    place = block // WORLD * ROWS
                if (not TWO) | (owner == peer):
                    landing = translate(box, bases, rank, peer) + (slot * (WORLD - 1) + hop - 1) * size
                    copy(landing + (place - first).to(tl.int64) * HIDDEN, x, first * HIDDEN, end * HIDDEN, BLOCK, ALIGNED)
                    if not LATE:
                        announce(flag_address(flags, rank * blocks_most + block, bases, rank, peer), epoch, TARGET)
        block = (turn - AHEAD) * programs + program
        owner = owner_of(block, programs, WORLD, TURNED)
        if (turn >= AHEAD) & (block < blocks):
            if (not TWO) | (owner == rank):
                first = block * ROWS
                end = tl.minimum(first + ROWS, m)
                place = first
                if TWO:
                    place = block // WORLD * ROWS
                for hop in tl.static_range(1, WORLD):
                    source = (rank + hop) % WORLD
                    index = source * blocks_most + block
                    wait(flags + index, epoch, source, index, control, TARGET)
                for row in tl.range(first, end, num_stages=1):
                    total = sum_of_row(x, residual, mine, row, place + row - first, size, cols, rank, WORLD, HIDDEN, ADDED)
                    if TWO:
                        short = rounded(total, sums.dtype.element_ty, TARGET)
                        at = (sum_rows + row) * HIDDEN + cols
                        for hop in tl.static_range(1, WORLD):
                            landing = translate(sums, bases, rank, (rank + hop) % WORLD)
                            tl.store(landing + at, short, mask=cols < HIDDEN)
                    finish(
                        tl.reshape(total, [1, COLS]), static_factor, factors, row + tl.arange(0, 1), HIDDEN, m, eps,
                        y, new_residual, scales, OFFSET, QUANT, TARGET,
                    )  # fmt: skip
                if TWO and not LATE:
                    for hop in tl.static_range(1, WORLD):
                        announce(flag_address(sum_flags, block, bases, rank, (rank + hop) % WORLD), epoch, TARGET)
        if TWO:
            block = (turn - 2 * AHEAD) * programs + program
            owner = owner_of(block, programs, WORLD, TURNED)
            if (turn >= 2 * AHEAD) & (block < blocks) & (owner != rank):
                first = block * ROWS
                end = tl.minimum(first + ROWS, m)
                wait(sum_flags + block, epoch, owner, block, control, TARGET)
                for row in tl.range(first, end, num_stages=1):
                    at = (sum_rows + row) * HIDDEN + cols
                    total = tl.load(sums + at, mask=cols < HIDDEN, other=0).to(tl.float32)
                    finish(
                        tl.reshape(total, [1, COLS]), static_factor, factors, row + tl.arange(0, 1), HIDDEN, m, eps,
                        y, new_residual, scales, OFFSET, QUANT, TARGET,
                    )  # fmt: skip
        if LATE:
            block = turn * programs + program
            owner = owner_of(block, programs, WORLD, TURNED)
            if block < blocks:
                for hop in tl.static_range(1, WORLD):
                    peer = (rank + hop) % WORLD
                    if (not TWO) | (owner == peer):
                        announce(flag_address(flags, rank * blocks_most + block, bases, rank, peer), epoch, TARGET)
            block = (turn - AHEAD) * programs + program
            owner = owner_of(block, programs, WORLD, TURNED)
            if TWO:
                if (turn >= AHEAD) & (block < blocks) & (owner == rank):
                    for hop in tl.static_range(1, WORLD):
                        announce(flag_address(sum_flags, block, bases, rank, (rank + hop) % WORLD), epoch, TARGET)
    tl.debug_barrier()  # all threads have read the state
    tl.store(state + program, epoch + 1)


class Push(NormKernel):
    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, dtype = problem.world_size, config["rows"], context.dtype(problem)
        two = config["shots"] == "two"
        self.blocks = ceil_div(problem.m, rows)
        self.room = (ceil_div(self.blocks, world) if two else self.blocks) * rows
        self.box = context.heap.alloc((2, world - 1, self.room, problem.hidden), dtype)
        self.sums = context.heap.alloc((2, self.blocks * rows, problem.hidden) if two else (8,), dtype)
        self.flags = context.flags(world * self.blocks)
        self.sum_flags = context.flags(self.blocks)
        # The interpreter runs programs one after the other, so no program may wait for data that a later program of a peer sends.
        self.programs = 1 if context.interpreted else min(config["per_processor"] * context.processors, self.blocks)
        self.state = context.empty((self.programs,), torch.int32).fill_(1)
        self.constants |= {
            "WORLD": world, "TWO": two, "TURNED": config["owners"] == "turned", "LATE": config["signals"] == "late",
            "HIDDEN": problem.hidden, "ROWS": rows, "AHEAD": config["ahead"], "BLOCK": MOST_COPIED,
            "ALIGNED": 16 // problem.item_size if problem.hidden * problem.item_size % 16 == 0 else 1,
            "EARLY": context.hardware.launches_overlap, **together(context, config),
        }  # fmt: skip

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        context = self.context
        context.launch(
            push_kernel, (self.programs,),
            x, residual, weight, new_residual, y, scales, self.box, self.sums, self.flags, self.sum_flags, context.heap.bases, self.control, self.state,
            context.rank, self.problem.m, eps, self.room, self.blocks, **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllReduceNorm) -> dict[str, Any]:  # noqa: ARG002
        """Any number of rows: a flag holds the number of its call, and blocks keep their places."""
        return {}


MOST_COPIED = 4096
"""Most elements that a program copies at a time."""
