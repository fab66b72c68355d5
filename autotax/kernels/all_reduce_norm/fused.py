"""fused: for few rows behind a product. One kernel computes the product, and sends and normalises it as `one_shot` does.

Each program computes tiles of all rows. It sends them as words to every rank, this one too, so a program that normalises a row
needs no sign of the tiles: the row is complete when its words have arrived. No counter and no fence lies between the product and
the norm.

Why every wait ends: programs first compute and send all their tiles without waiting. The rest is as in `one_shot`, where the words
of this rank are some of those that it waits for. Why no stale word matches: see `one_shot`. Words of this rank are written and read
by kernels of one stream.
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
from autotax.kernels.all_gather_gemm.products import load_tile
from autotax.kernels.all_gather_gemm.tiles import TileOptions
from autotax.kernels.all_reduce_norm.norm import given_factor
from autotax.kernels.all_reduce_norm.one_shot import OneShot, clean_rows, norm_rows
from autotax.kernels.all_reduce_norm.packets import packed_numbers, slot_of
from autotax.kernels.context import Context, gdc_wait
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.primitives import LIMIT, dot, store_whole
from autotax.operators.all_reduce_norm import AllReduceNorm

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
        there = (row + tl.minimum(at, HIDDEN - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\nmov.u32 $0, 0;", "=r,l", [there], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def streamed(b, col, at, n, k, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr):
    """`load_tile` by pointers, for elements that are read once. WHOLE: no block reaches beyond the matrix."""
    r = col + tl.arange(0, ROWS)
    c = at + tl.arange(0, COLS)
    there = tl.multiple_of(b + r.to(tl.int64)[:, None] * k + c[None, :], (2, ALIGNED * 2))
    if WHOLE:
        return tl.load(there, eviction_policy=EVICT)
    else:  # noqa: RET505 - decided when compiled
        return tl.load(there, mask=(r < n)[:, None] & (c < k)[None, :], other=0.0, eviction_policy=EVICT)


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
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(state + program)
    before = tl.load(state + programs + program)
    limit = tl.load(control + LIMIT)
    given = given_factor(scales, QUANT)
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
            there = (here.to(tl.int64) + away[hop]).to(inbox.dtype)
            store_whole(tl.multiple_of(there, (16,)), words, inside, TARGET)
    # Here rather than at the start: the product need not wait for the number of the call.
    clean_rows(inbox, epoch, before, program, programs, rank, room, 0, WORLD, WIDE, WIDTH, SPLIT, PART, SENT, TARGET)
    norm_rows(
        None, residual, weight, new_residual, y, scales, inbox, epoch, given, control, limit, program, programs, rank, m, eps, room,
        WORLD, WIDE, TYPE, WIDTH, HIDDEN, SPLIT, PART, HELD, COLS, OFFSET, QUANT, ADDED, TARGET,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read the state
    tl.store(state + program, epoch + 1)
    tl.store(state + programs + program, m)


class Fused(OneShot):
    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        block_m = max(LEAST_ROWS, power_of_two(problem.m))
        self.tiles = TileOptions.of(Config.of(config.variant, config.values | {"block_m": block_m, "group_m": 1}))
        super().__init__(problem, config, context)
        tiles = self.tiles
        self.constants |= {
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "TMA": tiles.tma,
            "ALIGNED_K": math.gcd(problem.k, 16),
            "WHOLE": problem.hidden % tiles.block_n == 0 == problem.k % tiles.block_k,
            "EVICT": EVICT[config["weights"]],
            "TURNED": config["columns"] == "turned",
            "num_stages": config["num_stages"],
        }

    def units(self, problem: AllReduceNorm, config: Config) -> int:
        """See OneShot.units."""
        return max(ceil_div(problem.hidden, self.tiles.block_n), super().units(problem, config))

    def unnormed(self, problem: AllReduceNorm) -> Tensor:  # noqa: ARG002
        """None: the product stays in registers."""
        return self.context.empty((0,), torch.int64)

    def addend(self, a: Tensor, b: Tensor) -> Any:
        """The operands: the kernel multiplies them."""
        return a, b

    def run(
        self, x: Any, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float
    ) -> None:
        """See NormKernel.run."""
        a, b = x
        context, problem = self.context, self.problem
        context.launch(
            fused_kernel, (self.programs,),
            self.tiles.view_a(a), self.tiles.view_b(b), residual, weight, new_residual, y, scales,
            self.inbox, context.heap.bases, self.control, self.state, context.rank, problem.m, problem.k, eps, self.room,
            **self.constants,
        )  # fmt: skip
