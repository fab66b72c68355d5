"""decomposed: calls of the vendor's GEMM compute the rows of one rank after another, each while the result before is sent.

The number of GEMMs is a trade-off: few large ones are fast, the results of many small ones can be sent early. `products` is one of
- `one`: all rows at once; then all rows are sent;
- `each`: owner by owner, rank + 1 first and this rank's rows last, so that every rank receives from one rank at a time;
- `halves`: like `each`, with two GEMMs per owner.

`sender` is one of
- `engine`: the copy engines send; they take no processor;
- `kernel`: a kernel of `comm` programs sends;
- `product`: the GEMM stores its result directly in the owner's memory.

After this rank's last GEMM one kernel adds up the received rows. With a replicated output another kernel receives the sums of the
other ranks. A flag of the copy engines is a copy of the ticket in which `open_slot` wrote the number of this call; stream order
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

HALVES = {"halves": 2}
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
    WORLD: tl.constexpr, REPLICATED: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds up this rank's rows, piece by piece. Each piece waits for the other ranks' flags [piece of `high` rows, source]."""
    epoch = tl.load(control + EPOCH) - 1  # `open_slot` has already advanced the epoch
    across = tl.cdiv(n, COLS)
    own_rows = tl.maximum(tl.minimum(rows, m - rank * rows), 0)
    for piece in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0), num_stages=1):
        row = piece // across * ROWS
        col = piece % across * COLS
        for hop in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - hop) % WORLD
            index = row // high * WORLD + source
            wait(arrived + index, epoch, source, index, control, TARGET)
        total = sum_of_ranks(box, slot, row, own_rows, col, n, room, bases, rank, WORLD, False, ROWS, COLS, ALIGNED)
        store_sum(
            total, out, bias, residual, added, sums, slot, row, col, m, n, rows, room, bases, rank,
            WORLD, REPLICATED, ROWS, COLS, ALIGNED, TARGET,
        )  # fmt: skip
        if REPLICATED:
            line = row // LINE
            need = tl.cdiv(tl.minimum(LINE, rows - line * LINE), ROWS) * across
            tell_sums(line, need, counts, raised, sum_flags, bases, rank, epoch, tl.cdiv(room, LINE), WORLD, TARGET)


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
        self.sender, self.pieces, self.room = config["sender"], HALVES.get(config["products"], 1), problem.shard_rows
        self.box = context.heap.alloc((2, world, self.room, n), dtype)
        self.sums = context.heap.alloc((2, world, self.room, n) if replicated else (8,), dtype)
        lines = ceil_div(self.room, LINE)
        self.arrived, self.begun = context.flags(self.pieces * world).view(self.pieces, world), context.flags(world)
        self.sum_flags = context.flags(world * lines)
        self.counts, self.raised, self.sent, self.ticket = (
            context.empty((size,), torch.int32).zero_() for size in (lines, lines, self.pieces * world, 1)
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
        columns = b if problem.weight == "nk" else b.t()
        if self.config["products"] == "one":
            context.matmul(a, columns, self.staging[: problem.m])
        for owner in self.owners:
            for piece in range(self.pieces):
                self.deliver(a, columns, owner, piece, slot)
        context.rejoin(self.beside)
        self.add_up(out, addends(out, bias, residual), slot)

    def deliver(self, a: Tensor, columns: Tensor, owner: int, piece: int, slot: int) -> None:
        """Computes some rows of an owner, unless they are computed already, and sends them. Rows of this rank stay here."""
        context, rank, box = self.context, self.context.rank, self.box[slot]
        rows, high = self.problem.shard_rows, self.height
        top, bottom = (min(at * high, max(0, min(rows, self.problem.m - owner * rows))) for at in (piece, piece + 1))
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

    @property
    def height(self) -> int:
        """Rows of a piece: a multiple of the rows that are added up at a time."""
        return ceil_div(ceil_div(self.problem.shard_rows, self.pieces), ROWS) * ROWS

    def add_up(self, out: Tensor, added: tuple[Any, Any, Any], slot: int) -> None:
        problem, context = self.problem, self.context
        replicated, rows = problem.output == "replicated", problem.shard_rows
        sizes = (problem.m, problem.n, rows, self.room)
        bases, grid = context.heap.bases, (min(PER_PROCESSOR * context.processors, ceil_div(rows, ROWS) * ceil_div(problem.n, COLS)),)
        context.launch(
            add_kernel, grid,
            out, *added, self.box, self.sums, self.counts, self.raised, self.arrived, self.sum_flags, bases, self.control,
            context.rank, slot, *sizes, self.height, REPLICATED=replicated, **self.constants,
        )  # fmt: skip
        if replicated:
            context.launch(
                receive_kernel, grid, out, *added, self.sums, self.sum_flags, self.control, context.rank, slot, *sizes,
                **self.constants,
            )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Supports any number of rows: slots keep the places they have for the most rows, and every call raises every flag."""
        return {}


class ScaledDecomposed(Scaled, Decomposed):
    """`decomposed` with products of e4m3."""
