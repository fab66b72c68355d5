"""one_shot: every rank sends its rows to all ranks as words, then adds up and normalises all rows. One kernel, one trip.

SPLIT programs share a row. Each sends its part of the columns, adds up the whole row, because the norm needs all of it, and
normalises, quantises and stores its part. So several processors send even in a call of few rows, and no second exchange is needed.

Why every wait ends: programs first send all their words without waiting, then they wait for words of all peers. All programs are
resident at the same time, because the launch is cooperative.

Why no stale word matches: an `epoch` word holds the number of its call. A slot of `blank` words (see `packets`) was reset to
BLANK since the last call that wrote it. No word is replaced before it was read: a rank overwrites a slot two calls later, with
`blank` words three. By then it has received words of the previous call from every peer. Each peer sent those after the call
before that one had ended, with its reads of the slot and its reset to BLANK. Each call sends at least one word to every peer,
whatever its rows.

The whole program votes whether all words have arrived. The vote and the sum use the same loaded values (see
`gemm_reduce_scatter.words`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_reduce_norm.norm import NormKernel, factor_of, finish, given_factor, scale_of_row, store_normed, together
from autotax.kernels.all_reduce_norm.packets import await_sum, clean, look, numbers, packed, slot_of
from autotax.kernels.context import Context, gdc_wait
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.gemm_reduce_scatter.words import TYPES
from autotax.kernels.primitives import LIMIT, store_whole
from autotax.operators.all_reduce_norm import GROUP, AllReduceNorm


@triton.jit
def own_numbers(x, at, inside, WIDE: tl.constexpr, TYPE: tl.constexpr):
    """This rank's numbers at some words, or zeros where `x` is None."""
    if x is None:
        return numbers(tl.zeros(at.shape, tl.int64 if WIDE else tl.int32), WIDE, TYPE)
    else:  # noqa: RET505 - decided when compiled
        return numbers(tl.load(x + at, mask=inside, other=0), WIDE, TYPE)


@triton.jit
def clean_rows(
    inbox, epoch, before, program, programs, rank, room, FIRST: tl.constexpr,
    WORLD: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, SENT: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Resets this program's words of the previous call, which had `before` rows, of all ranks from FIRST hops on; see `packets`."""
    if WIDE:
        lanes = tl.arange(0, SENT)
        old = slot_of(epoch - 1, WIDE) * WORLD
        for unit in tl.range(program, before * SPLIT, programs, num_stages=1):
            first = unit % SPLIT * PART
            at = tl.cast(unit // SPLIT, tl.int64) * WIDTH + first
            for start in tl.static_range(0, PART, SENT):
                inside = (start + lanes < PART) & (first + start + lanes < WIDTH)
                for hop in tl.static_range(FIRST, WORLD):
                    there = inbox + (old + (rank + hop) % WORLD) * room + at + start + lanes
                    clean(there, inside, TARGET)


@triton.jit
def norm_rows(
    x, residual, weight, new_residual, y, scales, inbox, epoch, given, control, limit, program, programs, rank, m, eps, room,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, HELD: tl.constexpr, COLS: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds up and normalises this program's parts of rows. `x` are the data of this rank's words, or None if they come by the inbox
    too.
    """
    slot = slot_of(epoch, WIDE) * WORLD
    apart = rank
    if x is None:
        apart = -1
    lane = tl.arange(0, HELD)
    PER: tl.constexpr = HIDDEN // WIDTH
    cols = tl.arange(0, COLS)
    word = tl.arange(0, COLS // PER)
    row_inside = word < WIDTH
    factors = tl.zeros([COLS], tl.float32)
    if (SPLIT == 1) | (QUANT == "row"):
        factors = tl.load(weight + cols, mask=cols < HIDDEN, other=0).to(tl.float32)
    for unit in tl.range(program, m * SPLIT, programs, num_stages=1):
        row = tl.cast(unit // SPLIT, tl.int64)
        at = row * WIDTH + word
        own = own_numbers(x, at, row_inside, WIDE, TYPE)
        added = tl.zeros([COLS], tl.float32)
        if ADDED:
            there = residual + row * HIDDEN + cols
            added = tl.load(there, mask=cols < HIDDEN, other=0).to(tl.float32)
        total = await_sum(
            own, inbox + slot * room + at, room, row_inside, inbox, epoch, apart, control, limit, WORLD, WIDE, TYPE, TARGET
        )
        if ADDED:
            total += added
        total = tl.reshape(total, [1, COLS])
        rows = row + tl.arange(0, 1)
        if SPLIT == 1:
            finish(total, given, factors, rows, HIDDEN, m, eps, y, new_residual, scales, OFFSET, QUANT, TARGET)
        else:
            # The words of this program's part have arrived. Their second load ends before the norm of the row is known, and all that
            # follows is done for this part alone.
            first = unit % SPLIT * PART
            inside = (lane < PART) & (first + lane < WIDTH)
            at = row * WIDTH + first + lane
            own = own_numbers(x, at, inside, WIDE, TYPE)
            _, part = look(own, inbox + slot * room + at, room, inside, inbox, epoch, apart, WORLD, WIDE, TYPE, TARGET)
            begin = first * PER
            end = tl.minimum(begin + PART * PER, HIDDEN)
            ours = begin + tl.arange(0, HELD * PER)
            if ADDED:
                part += tl.load(residual + row * HIDDEN + ours, mask=ours < end, other=0).to(tl.float32)
            by = tl.load(weight + ours, mask=ours < end, other=0).to(tl.float32)
            short = rounded(total, new_residual.dtype.element_ty, TARGET).to(tl.float32)
            factor = factor_of(short, HIDDEN, eps)
            scale = factor
            if QUANT == "row":
                scale = scale_of_row(short, factor, factors, OFFSET, new_residual.dtype.element_ty, TARGET)
            short = tl.reshape(rounded(part, new_residual.dtype.element_ty, TARGET), [1, HELD * PER])
            store_normed(
                short, factor, scale, given, by, rows, begin, HIDDEN, m, end, y, new_residual, scales, OFFSET, QUANT, TARGET
            )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "m", "eps"])
def one_shot_kernel(
    x, residual, weight, new_residual, y, scales, inbox, bases, control, state, rank, m, eps, room,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, SENT: tl.constexpr, HELD: tl.constexpr, COLS: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`x` are the data of words, int32 or with WIDE int64: WIDTH per row, PART per program. A program sends SENT words at a time.
    HELD is PART rounded up to a power of two. `inbox` are words [slots, source, room]; `state` is int32 [2, programs]: the number
    of the call, and the rows of the previous call.
    """
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(state + program)
    before = tl.load(state + programs + program)
    limit = tl.load(control + LIMIT)
    given = given_factor(scales, QUANT)
    away = distances(bases, rank, WORLD)
    slot = slot_of(epoch, WIDE) * WORLD
    lanes = tl.arange(0, SENT)
    for unit in tl.range(program, m * SPLIT, programs, num_stages=1):
        first = unit % SPLIT * PART
        at = tl.cast(unit // SPLIT, tl.int64) * WIDTH + first
        for start in tl.static_range(0, PART, SENT):
            inside = (start + lanes < PART) & (first + start + lanes < WIDTH)
            words = packed(tl.load(x + at + start + lanes, mask=inside, other=0), epoch)
            for hop in tl.static_range(WORLD - 1):
                there = (inbox.to(tl.int64) + away[hop]).to(inbox.dtype) + (slot + rank) * room
                store_whole(tl.multiple_of(there + at + start + lanes, (16,)), words, inside, TARGET)
    clean_rows(inbox, epoch, before, program, programs, rank, room, 1, WORLD, WIDE, WIDTH, SPLIT, PART, SENT, TARGET)
    norm_rows(
        x, residual, weight, new_residual, y, scales, inbox, epoch, given, control, limit, program, programs, rank, m, eps, room,
        WORLD, WIDE, TYPE, WIDTH, HIDDEN, SPLIT, PART, HELD, COLS, OFFSET, QUANT, ADDED, TARGET,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read the state
    tl.store(state + program, epoch + 1)
    tl.store(state + programs + program, m)


class OneShot(NormKernel):
    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.wide = config["words"] == "blank"
        per = (8 if self.wide else 4) // problem.item_size  # elements per word
        width, split = problem.hidden // per, config["split"]
        part = ceil_div(ceil_div(problem.hidden, split), GROUP) * GROUP // per
        self.room = problem.m * width
        if self.wide:
            self.inbox = context.heap.alloc((3, problem.world_size, self.room), torch.int64).fill_(-1)
        else:
            # Zeros are words of call 0. Calls start at 1, so they never match.
            self.inbox = context.heap.zeros((2, problem.world_size, self.room), torch.int64)
        # The interpreter runs programs one after the other, so no program may wait before the last has sent.
        most = config["per_processor"] * context.processors
        self.programs = 1 if context.interpreted else min(most, self.units(problem, config))
        self.state = context.empty((2, self.programs), torch.int32)
        self.state[0], self.state[1] = 1, 0
        self.constants |= {
            "WORLD": problem.world_size,
            "WIDE": self.wide,
            "TYPE": TYPES[context.dtype(problem)],
            "WIDTH": width,
            "HIDDEN": problem.hidden,
            "SPLIT": split,
            "PART": part,
            "SENT": min(MOST_SENT, power_of_two(part)),
            "HELD": power_of_two(part),
            "EARLY": context.hardware.launches_overlap,
            **together(context, config),
        }

    def units(self, problem: AllReduceNorm, config: Config) -> int:
        """How many programs have work at the same time."""
        return int(problem.m * config["split"])

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """See NormKernel.run."""
        context = self.context
        context.launch(
            one_shot_kernel, (self.programs,),
            x.view(-1).view(torch.int64 if self.wide else torch.int32), residual, weight, new_residual, y, scales,
            self.inbox, context.heap.bases, self.control, self.state, context.rank, self.problem.m, eps, self.room,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllReduceNorm) -> dict[str, Any]:  # noqa: ARG002
        """Any number of rows: a word identifies its call, and the kernel remembers the rows of the previous call."""
        return {}


MOST_SENT = 2048
"""Most words that a program sends at a time."""
