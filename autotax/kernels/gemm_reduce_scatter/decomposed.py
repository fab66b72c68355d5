"""decomposed: calls of the vendor's GEMM compute the rows of one rank after another, each while the result before is sent.

The number of GEMMs is a trade-off: few large ones are fast, the results of many small ones can be sent early. `products` is one of
- `one`: all rows at once; then all rows are sent;
- `each`: owner by owner, rank + 1 first and this rank's rows last, so that every rank receives from one rank at a time;
- `halves`, `quarters`: like `each`, with two or four GEMMs per owner.

`sender` is one of
- `engine`: the copy engines send; they take no processor;
- `kernel`: a kernel of `comm` programs sends;
- `product`: the GEMM stores its result directly in the owner's memory.

After this rank's last GEMM one kernel adds up the received rows. With a replicated output it sends the sums, and another kernel
receives those of the other ranks. With `sums early` each piece of this rank's rows is added up behind its GEMM, and copy engines
send its sums beside the next one; only those of the last piece travel when no GEMM is left. A flag of the copy engines is a copy of the ticket in which `open_slot` wrote the number of this call; stream order
puts it after its data. `open_slot` is on the stream of the sends, so the first GEMM runs beside it, unless that GEMM itself stores
in an owner's memory. See docs/memory-model.md for why every wait ends.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.push_gather import open_slot
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, addends, receive_sums, store_sum, sum_of_ranks, tell_sums
from autotax.kernels.gemm_reduce_scatter.scaled_sums import Scaled
from autotax.kernels.primitives import EPOCH, copy, count, flag_address, signal, translate, wait
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

CUTS = {"halves": 2, "quarters": 4}
ROWS, COLS = 16, 256
"""Rows and columns that a program adds up at a time."""
LINE = 64
"""Rows of sums that share a flag: a multiple of ROWS."""
COPY_ELEMENTS = 16384
PER_PROCESSOR = 8
"""Programs per processor that add up: each waits for its loads, and one would leave two thirds of the bandwidth unused."""


@triton.jit(do_not_specialize=["rank", "owner"])
def send_rows(
    landing, rows, size, bases, flags, index, done, rank, owner,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Copies `size` elements to the owner, one part per program. The last program to finish signals the owner."""
    programs = tl.num_programs(0)
    part = tl.cdiv(tl.cdiv(size, programs), BLOCK) * BLOCK
    start = tl.program_id(0) * part
    copy(translate(landing, bases, rank, owner), rows, start, tl.minimum(start + part, size), BLOCK, ALIGNED)
    if count(done, TARGET, "sys") == programs - 1:
        tl.store(done, 0)
        signal(flag_address(flags, index, bases, rank, owner), 1, TARGET, "sys")


@triton.jit(do_not_specialize=["rank", "slot", "added"])
def add_kernel(
    out, bias, residual, added, box, sums, counts, raised, arrived, sum_flags, bases, control, rank, slot, m, n, rows, room, high,
    top, bottom, WORLD: tl.constexpr, REPLICATED: tl.constexpr, FAR: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds up this rank's rows, those from `top` to `bottom` or without these all, ROWS x COLS at a time. They wait for the other
    ranks' flags [piece of `high` rows, source]. FAR: see `store_sum`.
    """
    epoch = tl.load(control + EPOCH) - 1  # `open_slot` has already advanced the epoch
    across = tl.cdiv(n, COLS)
    own_rows = tl.maximum(tl.minimum(rows, m - rank * rows), 0)
    first, end = 0, rows
    if top is not None:
        first, end = top, bottom
    for piece in tl.range(tl.program_id(0), tl.cdiv(end - first, ROWS) * across, tl.num_programs(0), num_stages=1):
        row = first + piece // across * ROWS
        col = piece % across * COLS
        for hop in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - hop) % WORLD
            index = row // high * WORLD + source
            wait(arrived + index, epoch, source, index, control, TARGET)
        total = sum_of_ranks(box, slot, row, own_rows, col, n, room, bases, rank, WORLD, False, ROWS, COLS, ALIGNED)
        store_sum(
            total, out, bias, residual, added, sums, slot, row, col, m, n, rows, room, bases, rank,
            WORLD, REPLICATED, ROWS, COLS, ALIGNED, TARGET, FAR,
        )  # fmt: skip
        if REPLICATED:
            line = row // LINE
            need = tl.cdiv(tl.minimum(LINE, rows - line * LINE), ROWS) * across
            tell_sums(line, need, counts, raised, sum_flags, bases, rank, epoch, tl.cdiv(room, LINE), WORLD, TARGET, FAR)


@triton.jit(do_not_specialize=["rank", "slot", "added"])
def receive_kernel(
    out, bias, residual, added, sums, sum_flags, control, rank, slot, m, n, rows, room,
    WORLD: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Receives the sums of the other ranks."""
    epoch = tl.load(control + EPOCH) - 1
    receive_sums(
        out, bias, residual, added, sums, sum_flags, control, rank, epoch, slot, tl.program_id(0), tl.num_programs(0), m, n, rows, room,
        WORLD, LINE, ROWS, COLS, ALIGNED, TARGET,
    )  # fmt: skip


class Decomposed(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, n, dtype = problem.world_size, problem.n, context.dtype(problem)
        replicated = problem.output == "replicated"
        self.sender, self.pieces, self.room = config["sender"], CUTS.get(config["products"], 1), problem.shard_rows
        self.box = context.heap.alloc((2, world, self.room, n), dtype)
        self.sums = context.heap.alloc((2, world, self.room, n) if replicated else (8,), dtype)
        self.early = replicated and config["sums"] == "early"
        lines = ceil_div(self.room, LINE)
        self.arrived, self.begun = context.flags(self.pieces * world).view(self.pieces, world), context.flags(world)
        self.sum_flags = context.flags(world * lines)
        self.counts, self.raised, self.sent, self.ticket, self.tickets = (
            context.empty((size,), torch.int32).zero_() for size in (lines, lines, self.pieces * world, 1, lines)
        )
        self.staging = context.empty((1 if self.sender == "product" else world * self.room, n), dtype)
        self.owners = [(context.rank + hop) % world for hop in range(1, world + 1)]
        self.beside = context.streams(1, urgent=True)
        self.calls = 0
        self.constants = {"WORLD": world, "ROWS": ROWS, "COLS": COLS, "LINE": LINE, "ALIGNED": math.gcd(n, 16), "num_warps": 8}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context = self.problem, self.context
        slot = self.calls % 2
        self.calls += not context.dry
        with nullcontext() if self.sender == "product" else context.beside(self.beside[0]):
            context.launch(
                open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, context.rank, slot,
                WORLD=problem.world_size, num_warps=1,
            )  # fmt: skip
            if self.early:
                context.copy(self.tickets, self.ticket.expand_as(self.tickets))
        added = addends(out, bias, residual)
        columns = b if problem.weight == "nk" else b.t()
        if self.config["products"] == "one":
            context.matmul(a, columns, self.staging[: problem.m])
        for owner in self.owners:
            for piece in range(self.pieces):
                self.deliver(a, columns, owner, piece, slot)
                if self.early and owner == context.rank and piece < self.pieces - 1:
                    self.send_sums(out, added, slot, piece)
        context.rejoin(self.beside)
        self.add_up(out, added, slot, *self.span(self.pieces - 1) if self.early else (None, None))
        if problem.output == "replicated":
            self.receive(out, added, slot)

    def deliver(self, a: Tensor, columns: Tensor, owner: int, piece: int, slot: int) -> None:
        """Computes some rows of an owner, unless they are computed already, and sends them. Rows of this rank stay here."""
        context, rank, box = self.context, self.context.rank, self.box[slot]
        rows = self.problem.shard_rows
        top, bottom = (min(at, max(0, self.problem.m - owner * rows)) for at in self.span(piece))
        landing = box[rank, top:bottom]
        taken = self.staging[owner * rows + top : owner * rows + bottom]
        whole = self.config["products"] == "one"
        if owner == rank or self.sender == "product":
            place = landing if owner == rank else context.heap.peer(landing, owner)
            taken = taken if whole else place
            if whole:
                context.copy(place, taken)
        if not whole and top < bottom:
            context.matmul(a[owner * rows + top : owner * rows + bottom], columns, taken)
        if owner == rank:
            return
        with context.beside(self.beside[0]):
            if self.sender == "kernel":
                index = piece * self.problem.world_size + rank
                count = self.sent[piece * self.problem.world_size + owner :]
                context.launch(
                    send_rows, (self.config["comm"],), landing, taken, taken.numel(), context.heap.bases, self.arrived, index, count,
                    rank, owner, BLOCK=COPY_ELEMENTS, ALIGNED=self.constants["ALIGNED"], num_warps=16 if context.hardware.on_gpu else 4,
                )  # fmt: skip
                return
            if self.sender == "engine" and top < bottom:
                context.copy(context.heap.peer(landing, owner), taken)
            context.copy(context.heap.peer(self.arrived[piece, rank : rank + 1], owner), self.ticket)

    def span(self, piece: int) -> tuple[int, int]:
        """The rows (first, end) of a piece of a shard."""
        return min(piece * self.height, self.problem.shard_rows), min((piece + 1) * self.height, self.problem.shard_rows)

    @property
    def height(self) -> int:
        """Rows of a piece: a multiple of those that are added up at a time, and of those whose sums share a flag."""
        grain = LINE if self.early else ROWS
        return ceil_div(ceil_div(self.problem.shard_rows, self.pieces), grain) * grain

    def grid(self, rows: int) -> tuple[int]:
        """The programs that add up or receive so many rows."""
        return (min(PER_PROCESSOR * self.context.processors, ceil_div(rows, ROWS) * ceil_div(self.problem.n, COLS)),)

    def send_sums(self, out: Tensor, added: tuple[Any, Any, Any], slot: int, piece: int) -> None:
        """Adds up a piece of this rank's rows. Copy engines send the sums, then the flags of their lines."""
        context, rank, (top, bottom) = self.context, self.context.rank, self.span(piece)
        if top == bottom:
            return
        context.rejoin(self.beside)  # what this rank has to send comes before programs that wait
        self.add_up(out, added, slot, top, bottom, far=False)
        sums, lines = self.sums[slot, rank, top:bottom], slice(top // LINE, ceil_div(bottom, LINE))
        flags = self.sum_flags.view(self.problem.world_size, -1)[rank, lines]
        with context.beside(self.beside[0]):
            for peer in self.owners[:-1]:
                context.copy(context.heap.peer(sums, peer), sums)
                context.copy(context.heap.peer(flags, peer), self.tickets[lines])

    def add_up(
        self, out: Tensor, added: tuple[Any, Any, Any], slot: int, top: int | None, bottom: int | None, *, far: bool = True
    ) -> None:
        """Adds up this rank's rows from `top` to `bottom`, or all. See `store_sum` for `far`."""
        problem, context = self.problem, self.context
        replicated, rows = problem.output == "replicated", problem.shard_rows
        high = rows if top is None or bottom is None else bottom - top
        if high:
            context.launch(
                add_kernel, self.grid(high),
                out, *added, self.box, self.sums, self.counts, self.raised, self.arrived, self.sum_flags, context.heap.bases,
                self.control, context.rank, slot, problem.m, problem.n, rows, self.room, self.height, top, bottom,
                REPLICATED=replicated, FAR=far, **self.constants,
            )  # fmt: skip

    def receive(self, out: Tensor, added: tuple[Any, Any, Any], slot: int) -> None:
        """Receives the sums of the other ranks."""
        problem, context, rows = self.problem, self.context, self.problem.shard_rows
        context.launch(
            receive_kernel, self.grid(rows),
            out, *added, self.sums, self.sum_flags, self.control, context.rank, slot, problem.m, problem.n, rows, self.room,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Supports any number of rows: slots keep the places they have for the most rows, and every call raises every flag."""
        return {}


class ScaledDecomposed(Scaled, Decomposed):
    """`decomposed` with products of e4m3."""
