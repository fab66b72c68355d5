"""two_shot: each rank owns some columns, adds them up and sends the new residual to all ranks as words. Then each rank normalises
all rows. One kernel, two trips; with many ranks it sends fewer bytes than `one_shot`.

Why every wait ends: programs first send their partial sums without waiting. Then they wait for partial sums, which every program
has sent before its first wait. After that they send the sums, and last they wait for the sums of the others. All programs are
resident at the same time, because the launch is cooperative.

Why no stale word matches: see `one_shot`. No word is replaced before it was read: a rank overwrites a slot two calls later, with
`blank` words three. By then it has the sums of the previous call, from ranks that had partial sums of every rank. So every rank
had begun the previous call and had ended all earlier ones, with their reads and their resets to BLANK.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_reduce_norm.norm import NormKernel, finish, given_factor, together
from autotax.kernels.all_reduce_norm.packets import await_row, await_sum, clean, numbers, packed, packed_numbers, slot_of
from autotax.kernels.context import Context, gdc_wait
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.gemm_reduce_scatter.words import TYPES
from autotax.kernels.primitives import LIMIT, store_whole
from autotax.operators.all_reduce_norm import AllReduceNorm


@triton.jit(do_not_specialize=["rank", "m", "eps"])
def two_shot_kernel(
    x, residual, weight, new_residual, y, scales, partials, sums, bases, control, state, rank, m, eps, room, sum_room,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OWN: tl.constexpr,
    TAKEN: tl.constexpr, COLS: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`x` are the data of words, int32 or with WIDE int64, WIDTH per row. Rank r adds up OWN of them from r * OWN on; TAKEN is
    OWN rounded up to a power of two. `partials` are words [slots, source, room], `sums` [slots, sum_room]; `state` as in
    `one_shot`.
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
    slot = slot_of(epoch, WIDE)
    PER: tl.constexpr = HIDDEN // WIDTH
    lanes = tl.arange(0, TAKEN)
    word = tl.arange(0, COLS // PER)
    for row in tl.range(program, m, programs, num_stages=1):
        for hop in tl.static_range(WORLD - 1):
            first = (rank + 1 + hop) % WORLD * OWN
            inside = (lanes < OWN) & (first + lanes < WIDTH)
            data = tl.load(x + tl.cast(row, tl.int64) * WIDTH + first + lanes, mask=inside, other=0)
            there = (partials.to(tl.int64) + away[hop]).to(partials.dtype) + (slot * WORLD + rank) * room
            there = there + tl.cast(row, tl.int64) * OWN + lanes
            store_whole(tl.multiple_of(there, (16,)), packed(data, epoch), inside, TARGET)
    if WIDE:
        old = slot_of(epoch - 1, WIDE)
        for row in tl.range(program, before, programs, num_stages=1):
            there = partials + old * WORLD * room + tl.cast(row, tl.int64) * OWN + lanes
            for hop in tl.static_range(1, WORLD):
                clean(there + (rank + hop) % WORLD * room, lanes < OWN, TARGET)
            clean(sums + old * sum_room + tl.cast(row, tl.int64) * WIDTH + word, word < WIDTH, TARGET)
    begin = rank * OWN
    cols = begin * PER + tl.arange(0, TAKEN * PER)
    own_inside = (lanes < OWN) & (begin + lanes < WIDTH)
    for row in tl.range(program, m, programs, num_stages=1):
        at = tl.cast(row, tl.int64)
        own = numbers(tl.load(x + at * WIDTH + begin + lanes, mask=own_inside, other=0), WIDE, TYPE)
        added = tl.zeros([TAKEN * PER], tl.float32)
        if ADDED:
            mask = (cols < begin * PER + OWN * PER) & (cols < HIDDEN)
            added = tl.load(residual + at * HIDDEN + cols, mask=mask, other=0).to(tl.float32)
        there = partials + slot * WORLD * room + at * OWN + lanes
        total = await_sum(own, there, room, own_inside, partials, epoch, rank, control, limit, WORLD, WIDE, TYPE, TARGET)
        if ADDED:
            total += added
        words = packed_numbers(total, epoch, WIDE, TYPE, TARGET)
        for hop in tl.static_range(WORLD):
            there = (sums.to(tl.int64) + away[hop]).to(sums.dtype) + slot * sum_room + at * WIDTH + begin + lanes
            store_whole(tl.multiple_of(there, (16,)), words, own_inside, TARGET)
    every = tl.arange(0, COLS)
    factors = tl.load(weight + every, mask=every < HIDDEN, other=0).to(tl.float32)
    later = 2 * limit  # a wait for partial sums times out first, and its note names the late rank
    for row in tl.range(program, m, programs, num_stages=1):
        there = sums + slot * sum_room + tl.cast(row, tl.int64) * WIDTH + word
        words = await_row(there, word < WIDTH, sums, epoch, control, later, OWN, WIDE, TARGET)
        total = numbers(words, WIDE, TYPE)
        rows = row + tl.arange(0, 1)
        finish(
            tl.reshape(total, [1, COLS]), given, factors, rows, HIDDEN, m, eps, y, new_residual, scales, OFFSET, QUANT, TARGET
        )  # fmt: skip
    tl.debug_barrier()  # all threads have read the state
    tl.store(state + program, epoch + 1)
    tl.store(state + programs + program, m)


class TwoShot(NormKernel):
    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.wide = config["words"] == "blank"
        per = (8 if self.wide else 4) // problem.item_size  # elements per word
        world, width = problem.world_size, problem.hidden // per
        own = ceil_div(ceil_div(problem.hidden, world), ALIGNED) * ALIGNED // per
        self.room, self.sum_room = problem.m * own, problem.m * width
        slots, empty = (3, -1) if self.wide else (2, 0)
        self.partials = context.heap.alloc((slots, world, self.room), torch.int64).fill_(empty)
        self.sums = context.heap.alloc((slots, self.sum_room), torch.int64).fill_(empty)
        # The interpreter runs programs one after the other, so no program may wait before the last has sent.
        self.programs = 1 if context.interpreted else min(config["per_processor"] * context.processors, problem.m)
        self.state = context.empty((2, self.programs), torch.int32)
        self.state[0], self.state[1] = 1, 0
        self.constants |= {
            "WORLD": world,
            "WIDE": self.wide,
            "TYPE": TYPES[context.dtype(problem)],
            "WIDTH": width,
            "HIDDEN": problem.hidden,
            "OWN": own,
            "TAKEN": power_of_two(own),
            "EARLY": context.hardware.launches_overlap,
            **together(context, config),
        }

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """See NormKernel.run."""
        context = self.context
        context.launch(
            two_shot_kernel, (self.programs,),
            x.view(-1).view(torch.int64 if self.wide else torch.int32), residual, weight, new_residual, y, scales,
            self.partials, self.sums, context.heap.bases, self.control, self.state, context.rank, self.problem.m, eps, self.room, self.sum_room,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllReduceNorm) -> dict[str, object]:  # noqa: ARG002
        """Any number of rows: a word identifies its call, and the kernel remembers the rows of the previous call."""
        return {}


ALIGNED = 16
"""A rank's part is a multiple of this many columns, so that it consists of whole vectors of words."""
