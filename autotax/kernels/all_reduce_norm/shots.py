"""Variants by words, each one kernel: `one_shot` in one trip, `fused` with a product in front, `two_shot` in two trips.

All programs of a kernel are resident at the same time, because the launch is cooperative. They send before they wait. The whole
program votes whether all words have arrived. The vote and the sum use the same loaded values (see `gemm_reduce_scatter.words`).
`docs/memory-model.md` says why every wait ends, no stale word matches, and none is replaced before it was read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_gather_gemm.gemm import TileOptions, load_tile
from autotax.kernels.all_reduce_norm.norm import NormKernel, factor_of, finish, given_factor, scale_of_row, store_normed
from autotax.kernels.context import Context, together
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.gemm_reduce_scatter.words import TYPES
from autotax.kernels.packets import (
    await_row,
    await_sum,
    clean,
    close_call,
    look,
    numbers,
    open_call,
    packed,
    packed_numbers,
    slot_of,
)
from autotax.kernels.primitives import dot, store_whole
from autotax.operators.all_reduce_norm import GROUP, AllReduceNorm

MOST_SENT = 2048
"""Most words that a program sends at a time."""
ALIGNED = 16
"""A rank's part is a multiple of this many columns, so that it consists of whole vectors of words."""


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
                    addresses = inbox + (old + (rank + hop) % WORLD) * room + at + start + lanes
                    clean(addresses, inside, TARGET)


@triton.jit
def norm_rows(
    x, residual, weight, new_residual, y, scales, inbox, epoch, static_factor, control, limit, program, programs, rank, m, eps, room,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, HELD: tl.constexpr, COLS: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds up and normalises parts of rows. `x` are the data of this rank's words, or None if they come by the inbox too."""
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
            addresses = residual + row * HIDDEN + cols
            added = tl.load(addresses, mask=cols < HIDDEN, other=0).to(tl.float32)
        total = await_sum(
            own, inbox + slot * room + at, room, row_inside, inbox, epoch, apart, control, limit, WORLD, WIDE, TYPE, TARGET
        )
        if ADDED:
            total += added
        total = tl.reshape(total, [1, COLS])
        rows = row + tl.arange(0, 1)
        if SPLIT == 1:
            finish(total, static_factor, factors, rows, HIDDEN, m, eps, y, new_residual, scales, OFFSET, QUANT, TARGET)
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
                short, factor, scale, static_factor, by, rows, begin, HIDDEN, m, end, y, new_residual, scales, OFFSET, QUANT, TARGET
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
    program, programs, epoch, before, limit = open_call(state, control, EARLY)
    static_factor = given_factor(scales, QUANT)
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
                landing = (inbox.to(tl.int64) + away[hop]).to(inbox.dtype) + (slot + rank) * room
                store_whole(tl.multiple_of(landing + at + start + lanes, (16,)), words, inside, TARGET)
    clean_rows(inbox, epoch, before, program, programs, rank, room, 1, WORLD, WIDE, WIDTH, SPLIT, PART, SENT, TARGET)
    norm_rows(
        x, residual, weight, new_residual, y, scales, inbox, epoch, static_factor, control, limit, program, programs, rank, m, eps, room,
        WORLD, WIDE, TYPE, WIDTH, HIDDEN, SPLIT, PART, HELD, COLS, OFFSET, QUANT, ADDED, TARGET,
    )  # fmt: skip
    close_call(state, program, programs, epoch, m)


class OneShot(NormKernel):
    """Every rank sends its rows to all ranks, then adds up and normalises all rows.

    SPLIT programs share a row. Each sends its part of the columns, adds up the whole row, because the norm needs all of it, and
    normalises, quantises and stores its part. So several processors send even in a call of few rows, without a second exchange.
    """

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
            "WORLD": problem.world_size, "WIDE": self.wide, "TYPE": TYPES[context.dtype(problem)], "WIDTH": width,
            "HIDDEN": problem.hidden, "SPLIT": split, "PART": part, "SENT": min(MOST_SENT, power_of_two(part)),
            "HELD": power_of_two(part), "EARLY": context.hardware.launches_overlap, **together(context, config),
        }  # fmt: skip

    def units(self, problem: AllReduceNorm, config: Config) -> int:
        """How many programs have work at the same time."""
        return int(problem.m * config["split"])

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
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


EVICT = {"kept": "", "passing": "evict_first"}
"""Eviction policies of weights in the L2, where pointers load them."""
LEAST_ROWS = 16
"""Rows of a tile at least: those that tensor cores multiply."""


@triton.jit
def bring(row, HIDDEN: tl.constexpr, COLS: tl.constexpr, TARGET: tl.constexpr):
    """Brings a row of 16 bits into the L2, so that the norm need not wait for memory."""
    if TARGET == "cuda":
        LINE: tl.constexpr = 64
        at = tl.arange(0, COLS // LINE if COLS > LINE else 1) * LINE
        addresses = (row + tl.minimum(at, HIDDEN - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\nmov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def streamed(b, col, at, n, k, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr):
    """`load_tile` by pointers, for elements that are read once. WHOLE: no block reaches beyond the matrix."""
    r = col + tl.arange(0, ROWS)
    c = at + tl.arange(0, COLS)
    addresses = tl.multiple_of(b + r.to(tl.int64)[:, None] * k + c[None, :], (2, ALIGNED * 2))
    if WHOLE:
        return tl.load(addresses, eviction_policy=EVICT)
    else:  # noqa: RET505 - decided when compiled
        return tl.load(addresses, mask=(r < n)[:, None] & (c < k)[None, :], other=0.0, eviction_policy=EVICT)


@triton.jit
def tile_of_rows(
    a, b, m, col, n, k, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    ALIGNED_K: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """A @ B[col:].T for all rows of A. Begins with the shift-th block of K, so that programs read different columns at a time."""
    blocks = tl.cdiv(k, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, blocks):
        at = (step + shift) % blocks * BLOCK_K
        x = load_tile(a, 0, at, m, k, k, BLOCK_M, BLOCK_K, TMA, ALIGNED_K)
        if TMA:  # noqa: SIM108 - decided when compiled
            y = b.load([col, at])
        else:
            y = streamed(b, col, at, n, k, BLOCK_N, BLOCK_K, ALIGNED_K, WHOLE, EVICT)
        acc = dot(x, y.T, acc, TARGET)
    return acc


@triton.jit(do_not_specialize=["rank", "m", "eps"])
def fused_kernel(
    a, b, residual, weight, new_residual, y, scales, inbox, bases, control, state, rank, m, k, eps, room,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, SENT: tl.constexpr, HELD: tl.constexpr, COLS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED_K: tl.constexpr,
    WHOLE: tl.constexpr, EVICT: tl.constexpr, TURNED: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`a` [m, k] and `b` [HIDDEN, k] are pointers, or TMA descriptors of blocks. BLOCK_M is at least m. See `one_shot_kernel`."""
    program, programs, epoch, before, limit = open_call(state, control, EARLY)
    static_factor = given_factor(scales, QUANT)
    away = distances(bases, rank, WORLD)
    if program == m:
        bring(weight, HIDDEN, COLS, TARGET)
    if ADDED:
        if program < m:
            bring(residual + tl.cast(program, tl.int64) * HIDDEN, HIDDEN, COLS, TARGET)
    mine = inbox + (slot_of(epoch, WIDE) * WORLD + rank) * room
    ACROSS: tl.constexpr = BLOCK_N // (HIDDEN // WIDTH)
    index = tl.arange(0, BLOCK_M * ACROSS)
    row = index // ACROSS
    for tile in tl.range(program, tl.cdiv(HIDDEN, BLOCK_N), programs):
        acc = tile_of_rows(
            a, b, m, tile * BLOCK_N, HIDDEN, k, program if TURNED else 0,
            BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED_K, WHOLE, EVICT, TARGET,
        )  # fmt: skip
        words = packed_numbers(tl.reshape(acc, [BLOCK_M * BLOCK_N]), epoch, WIDE, TYPE, TARGET)
        word = tile * ACROSS + index % ACROSS
        inside = (row < m) & (word < WIDTH)
        here = mine + row.to(tl.int64) * WIDTH + word
        for hop in tl.static_range(WORLD):  # the last is this rank
            addresses = (here.to(tl.int64) + away[hop]).to(inbox.dtype)
            store_whole(tl.multiple_of(addresses, (16,)), words, inside, TARGET)
    # Here rather than at the start: the product need not wait for the number of the call.
    clean_rows(inbox, epoch, before, program, programs, rank, room, 0, WORLD, WIDE, WIDTH, SPLIT, PART, SENT, TARGET)
    norm_rows(
        None, residual, weight, new_residual, y, scales, inbox, epoch, static_factor, control, limit, program, programs, rank, m, eps, room,
        WORLD, WIDE, TYPE, WIDTH, HIDDEN, SPLIT, PART, HELD, COLS, OFFSET, QUANT, ADDED, TARGET,
    )  # fmt: skip
    close_call(state, program, programs, epoch, m)


class Fused(OneShot):
    """For few rows behind a product: one kernel computes the product, and sends and normalises it as `one_shot` does.

    Each program computes tiles of all rows. It sends them as words to every rank, this one too, so a program that normalises a
    row needs no sign of the tiles: the row is complete when its words have arrived. No counter and no fence lies between the
    product and the norm. Programs compute and send all their tiles before they wait, for words of this rank too.
    """

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        block_m = max(LEAST_ROWS, power_of_two(problem.m))
        self.tiles = TileOptions.of(Config.of(config.variant, config.values | {"block_m": block_m, "group_m": 1}))
        super().__init__(problem, config, context)
        tiles = self.tiles
        self.constants |= {
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "TMA": tiles.tma,
            "ALIGNED_K": math.gcd(problem.k, 16),
            "WHOLE": problem.hidden % tiles.block_n == 0 == problem.k % tiles.block_k,
            "EVICT": EVICT[config["weights"]], "TURNED": config["columns"] == "turned",
            "num_stages": config["num_stages"],
        }  # fmt: skip

    def units(self, problem: AllReduceNorm, config: Config) -> int:
        return max(ceil_div(problem.hidden, self.tiles.block_n), super().units(problem, config))

    def unnormed(self, problem: AllReduceNorm) -> Tensor:  # noqa: ARG002
        """None: the product stays in registers."""
        return self.context.empty((0,), torch.int64)

    def addend(self, a: Tensor, b: Tensor) -> Any:
        """The operands: the kernel multiplies them."""
        return a, b

    def run(self, x: Any, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float) -> None:
        a, b = x
        context, problem = self.context, self.problem
        context.launch(
            fused_kernel, (self.programs,),
            self.tiles.view_a(a), self.tiles.view_b(b), residual, weight, new_residual, y, scales,
            self.inbox, context.heap.bases, self.control, self.state, context.rank, problem.m, problem.k, eps, self.room,
            **self.constants,
        )  # fmt: skip


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
    program, programs, epoch, before, limit = open_call(state, control, EARLY)
    static_factor = given_factor(scales, QUANT)
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
            addresses = (partials.to(tl.int64) + away[hop]).to(partials.dtype) + (slot * WORLD + rank) * room
            addresses = addresses + tl.cast(row, tl.int64) * OWN + lanes
            store_whole(tl.multiple_of(addresses, (16,)), packed(data, epoch), inside, TARGET)
    if WIDE:
        old = slot_of(epoch - 1, WIDE)
        for row in tl.range(program, before, programs, num_stages=1):
            addresses = partials + old * WORLD * room + tl.cast(row, tl.int64) * OWN + lanes
            for hop in tl.static_range(1, WORLD):
                clean(addresses + (rank + hop) % WORLD * room, lanes < OWN, TARGET)
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
        addresses = partials + slot * WORLD * room + at * OWN + lanes
        total = await_sum(own, addresses, room, own_inside, partials, epoch, rank, control, limit, WORLD, WIDE, TYPE, TARGET)
        if ADDED:
            total += added
        words = packed_numbers(total, epoch, WIDE, TYPE, TARGET)
        for hop in tl.static_range(WORLD):
            addresses = (sums.to(tl.int64) + away[hop]).to(sums.dtype) + slot * sum_room + at * WIDTH + begin + lanes
            store_whole(tl.multiple_of(addresses, (16,)), words, own_inside, TARGET)
    every = tl.arange(0, COLS)
    factors = tl.load(weight + every, mask=every < HIDDEN, other=0).to(tl.float32)
    later = 2 * limit  # a wait for partial sums times out first, and its note names the late rank
    for row in tl.range(program, m, programs, num_stages=1):
        addresses = sums + slot * sum_room + tl.cast(row, tl.int64) * WIDTH + word
        words = await_row(addresses, word < WIDTH, sums, epoch, control, later, OWN, WIDE, TARGET)
        total = numbers(words, WIDE, TYPE)
        rows = row + tl.arange(0, 1)
        finish(tl.reshape(total, [1, COLS]), static_factor, factors, rows, HIDDEN, m, eps, y, new_residual, scales, OFFSET, QUANT, TARGET)
    close_call(state, program, programs, epoch, m)


class TwoShot(NormKernel):
    """Each rank owns some columns, adds them up and sends the new residual to all ranks. Then each rank normalises all rows.

    With many ranks it sends fewer bytes than `one_shot`. Programs send partial sums before they wait for those of all ranks, then
    sums before they wait for the sums of the others.
    """

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
            "WORLD": world, "WIDE": self.wide, "TYPE": TYPES[context.dtype(problem)], "WIDTH": width,
            "HIDDEN": problem.hidden, "OWN": own, "TAKEN": power_of_two(own),
            "EARLY": context.hardware.launches_overlap, **together(context, config),
        }  # fmt: skip

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
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
