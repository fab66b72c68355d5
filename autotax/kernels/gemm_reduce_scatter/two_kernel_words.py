"""two_kernel_words, for few rows: the vendor's GEMM, then one kernel that exchanges and adds up partial sums as words.

The product [m, n] counts as one sequence of elements, in words of `packets`. `shots` selects the trips of a replicated output:

- `one`: every rank sends all words to all ranks, and each adds up everything. One trip.
- `two`: each rank adds up an equal share and sends the sums to all. Two trips, fewer bytes.

A scattered output takes one trip, to the owner of each row. All programs are resident. They send all their words before they
wait for partial sums, and their sums before they wait for those of others. See docs/memory-model.md.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context, together
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, addends
from autotax.kernels.gemm_reduce_scatter.scaled_sums import Scaled
from autotax.kernels.gemm_reduce_scatter.words import TYPES
from autotax.kernels.packets import await_row, await_sum, clean, close_call, numbers, open_call, packed, packed_numbers, slot_of
from autotax.kernels.primitives import store_whole
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

EVEN = tl.constexpr(2)
"""Shares are multiples of this many words, so that a thread moves two at a time."""
ROOMY = 16
"""Rooms are multiples of this many words, which the compiler then knows of their addresses."""


@triton.jit
def share_of(m, WIDTH: tl.constexpr, WORLD: tl.constexpr, HOW: tl.constexpr):
    """Words of a product of m rows that a rank adds up: those of its rows, an equal share, or all."""
    if HOW == "rows":
        return tl.cdiv(m, WORLD) * WIDTH
    elif HOW == "share":  # noqa: RET505 - decided when compiled
        return tl.cdiv(m * WIDTH, WORLD * EVEN) * EVEN
    else:
        return m * WIDTH


@triton.jit
def store_sums(total, out, bias, residual, added, here, stored, real, n, HOW: tl.constexpr, TARGET: tl.constexpr):
    """Stores float32 sums at the elements `here` of the output where `stored`. Where `real`, it is no padding and gets addends.

    A replicated output gets addends after its sum was rounded, for all ranks share the rounded sum.
    """
    if added is not None:
        if HOW != "rows":
            total = rounded(total, out.dtype.element_ty, TARGET).to(tl.float32)
        total += tl.load(bias + here % n, mask=real & (added % 2 == 1), other=0.0).to(tl.float32)
        total += tl.load(residual + here, mask=real & (added >= 2), other=0.0).to(tl.float32)
    tl.store(out + here, rounded(total, out.dtype.element_ty, TARGET), mask=stored)


@triton.jit(do_not_specialize=["rank", "m", "added"])
def exchange_kernel(
    out, bias, residual, added, x, partials, sums, bases, control, state, rank, m, n, room,
    WORLD: tl.constexpr, HOW: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr,
    BLOCK: tl.constexpr, SOURCES: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`x` are the data of words, int32 or with WIDE int64, WIDTH per row and PER elements each. A program moves BLOCK at a time.

    `partials` and `sums` are words [slots, rank, room]; SOURCES is WORLD rounded up to a power of two. `state` is int32
    [2, programs]: the number of the call, and the rows of the previous call.
    """
    program, programs, epoch, before, limit = open_call(state, control, EARLY)
    away = distances(bases, rank, WORLD)
    slot = slot_of(epoch, WIDE) * WORLD
    share = share_of(m, WIDTH, WORLD, HOW)
    end = m * WIDTH
    lanes = tl.arange(0, BLOCK)
    for unit in tl.range(program, tl.cdiv(share, BLOCK), programs, num_stages=1):
        at = unit * BLOCK + lanes
        for hop in tl.static_range(WORLD - 1):
            first = 0 if HOW == "all" else (rank + 1 + hop) % WORLD * share
            data = tl.load(x + first + at, mask=(at < share) & (first + at < end), other=0)
            landing = (partials.to(tl.int64) + away[hop]).to(partials.dtype) + (slot + rank) * room + at
            store_whole(tl.multiple_of(landing, (16,)), packed(data, epoch), at < share, TARGET)
    if WIDE:
        old = slot_of(epoch - 1, WIDE) * WORLD
        gone = share_of(before, WIDTH, WORLD, HOW)
        for unit in tl.range(program, tl.cdiv(gone, BLOCK), programs, num_stages=1):
            at = unit * BLOCK + lanes
            for hop in tl.static_range(1, WORLD):
                place = (old + (rank + hop) % WORLD) * room + at
                clean(partials + place, at < gone, TARGET)
                if HOW == "share":
                    clean(sums + place, at < gone, TARGET)
    first = 0 if HOW == "all" else rank * share
    element = tl.arange(0, BLOCK * PER)
    for unit in tl.range(program, tl.cdiv(share, BLOCK), programs, num_stages=1):
        at = unit * BLOCK + lanes
        inside = at < share
        own = numbers(tl.load(x + first + at, mask=inside & (first + at < end), other=0), WIDE, TYPE)
        total = await_sum(
            own, partials + slot * room + at, room, inside, partials, epoch, rank, control, limit, WORLD, WIDE, TYPE, TARGET
        )
        if HOW == "share":
            words = packed_numbers(total, epoch, WIDE, TYPE, TARGET)
            for hop in tl.static_range(WORLD - 1):
                landing = (sums.to(tl.int64) + away[hop]).to(sums.dtype) + (slot + rank) * room + at
                store_whole(tl.multiple_of(landing, (16,)), words, inside, TARGET)
        here = unit * (BLOCK * PER) + element
        ours = here < share * PER
        real = ours & (first * PER + here < end * PER)
        if HOW == "rows":
            store_sums(total, out, bias, residual, added, here, ours, real, n, HOW, TARGET)
        else:
            store_sums(total, out, bias, residual, added, first * PER + here, real, real, n, HOW, TARGET)
    if HOW == "share":
        later = 2 * limit  # a wait for partial sums times out first, and its note names the late rank
        lane = tl.arange(0, SOURCES * BLOCK)
        source = lane // BLOCK
        element = tl.arange(0, SOURCES * BLOCK * PER)
        owner = element // (BLOCK * PER)
        for unit in tl.range(program, tl.cdiv(share, BLOCK), programs, num_stages=1):
            at = unit * BLOCK + lane % BLOCK
            inside = (at < share) & (source < WORLD) & (source != rank)
            words = await_row(sums + (slot + source) * room + at, inside, sums, epoch, control, later, BLOCK, WIDE, TARGET)
            at = unit * (BLOCK * PER) + element % (BLOCK * PER)
            here = owner * (share * PER) + at
            real = (at < share * PER) & (owner < WORLD) & (owner != rank) & (here < end * PER)
            store_sums(numbers(words, WIDE, TYPE), out, bias, residual, added, here, real, real, n, HOW, TARGET)
    close_call(state, program, programs, epoch, m)


class TwoKernelWords(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        dtype, world = context.dtype(problem), problem.world_size
        how = "rows" if problem.output == "scattered" else {"one": "all", "two": "share"}[config["shots"]]
        self.wide = config["words"] == "blank"
        per = (8 if self.wide else 4) // dtype.itemsize  # elements per word
        width = problem.n // per
        words = {"rows": problem.shard_rows * width, "share": ceil_div(problem.m * width, world), "all": problem.m * width}[how]
        self.room = ceil_div(words, ROOMY) * ROOMY
        # Zeros are words of call 0. Calls start at 1, so they never match.
        slots, empty = (3, -1) if self.wide else (2, 0)
        self.partials = context.heap.alloc((slots, world, self.room), torch.int64).fill_(empty)
        self.sums = self.partials
        if how == "share":
            self.sums = context.heap.alloc((slots, world, self.room), torch.int64).fill_(empty)
        self.partial = context.empty((problem.m, problem.n), dtype)
        # The interpreter runs programs one after the other, so no program may wait before the last has sent.
        most = config["per_processor"] * context.processors
        self.programs = 1 if context.interpreted else min(most, ceil_div(self.room, config["block"]))
        self.state = context.empty((2, self.programs), torch.int32)
        self.state[0], self.state[1] = 1, 0
        self.constants: dict[str, Any] = {
            "WORLD": world, "HOW": how, "WIDE": self.wide, "TYPE": TYPES[dtype], "WIDTH": width, "PER": per,
            "BLOCK": config["block"], "SOURCES": power_of_two(world),
            "EARLY": context.hardware.launches_overlap, "num_warps": config["num_warps"], **together(context, config),
        }  # fmt: skip

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context = self.problem, self.context
        context.matmul(a, b if problem.weight == "nk" else b.t(), self.partial)
        context.launch(
            exchange_kernel, (self.programs,),
            out, *addends(out, bias, residual), self.partial.view(-1).view(torch.int64 if self.wide else torch.int32),
            self.partials, self.sums, context.heap.bases, self.control, self.state,
            context.rank, problem.m, problem.n, self.room, **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:
        """Any number of rows: a word identifies its call, and the kernel remembers the rows of the previous call."""
        return {"partial": self.partial[: smaller.m]}


class ScaledTwoKernelWords(Scaled, TwoKernelWords):
    """`two_kernel_words` with a product of e4m3."""
