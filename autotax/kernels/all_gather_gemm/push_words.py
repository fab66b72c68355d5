"""push_words: the whole shard travels as self-validating words while blocks of B are already loading. For few rows,
where loading B takes most of the time.

Four warps of every program send their part of this rank's shard and receive their part of the other shards
(`by_words`). They write both to the place from which the product reads A, K group by K group, and count finished work
on their GPU. Two warps load: one loads B, as far ahead as there are buffers; the other loads a K group of A when all
programs have counted it. One or two groups of four warps multiply (`roles`). There are no flags in the heap, no
system-scope fences, and no second kernel.

Waits: receivers wait for the peers, whose senders never wait. The warp that loads A waits for the receivers of its
own rank. All programs are resident, one per processor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.by_words import NOTHING, receive_words, send_words
from autotax.kernels.all_gather_gemm.roles import (
    BLOCK_K,
    X_ROWS,
    allocate,
    load_groups,
    load_parts,
    multiply_tiles,
    tile_at,
    wait_first,
)
from autotax.kernels.all_gather_gemm.views import Views
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, leave
from autotax.kernels.tiling import BLOCKS_BELOW_EACH_OTHER
from autotax.operators.all_gather_gemm import AllGatherGemm

GROUP_M = gl.constexpr(BLOCKS_BELOW_EACH_OTHER)
MOST_REGISTERS = {1: 168, 2: 128}
"""Registers per thread at the launch, by the number of multiplying groups."""


@gluon.jit
def exchange_words(exchange, rank, epoch, rows, WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, TARGET: gl.constexpr):
    send_words(exchange, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, True)
    receive_words(exchange, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, TARGET)


@gluon.jit
def load_b(
    b, buffers, share,
    X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Loads each block of B as soon as a buffer is empty."""
    x, y, full, empty = buffers
    items, rank, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, col = tile_at(item, rank, rows, n_tiles, 1, False, GROUP_M, True, BLOCK_M, BLOCK_N)
        for at in range(0, cols, DEPTH * BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, BLOCK_N * DEPTH * BLOCK_K * 2)
            for strip in gl.static_range(DEPTH):
                if X_IS_B:
                    load_groups(b[0], col, at + strip * BLOCK_K, loaded, x, stage * DEPTH + strip, 0, GROUPS, GROUPS)
                else:
                    load_parts(b, col, at + strip * BLOCK_K, loaded, y, stage * DEPTH + strip, Y1, Y2, Y3)
            turn += 1


@gluon.jit
def load_a(
    landed, counts, goal, control, source, buffers, share,
    K_GROUPS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr,
    STAGES: gl.constexpr, DEPTH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Loads blocks of A, each when all programs of this rank have stored its K group."""
    x, y, full, empty = buffers
    items, rank, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    turn = 0
    ready = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, _ = tile_at(item, rank, rows, n_tiles, 1, False, GROUP_M, True, BLOCK_M, BLOCK_N)
        for at in range(0, cols, DEPTH * BLOCK_K):
            while (ready < K_GROUPS) & (at >= ready * (cols // K_GROUPS)):
                ready += wait_first(counts, ready, K_GROUPS - ready, source, goal, control, 2, TARGET)
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, BLOCK_M * DEPTH * BLOCK_K * 2)
            for strip in gl.static_range(DEPTH):
                if X_IS_B:
                    load_parts((landed, landed, landed), row, at + strip * BLOCK_K, loaded, y, stage * DEPTH + strip, Y1, Y2, Y3)
                else:
                    load_groups(landed, row, at + strip * BLOCK_K, loaded, x, stage * DEPTH + strip, 0, GROUPS, GROUPS)
            turn += 1


@gluon.jit(do_not_specialize=["rank", "shard"])
def push_words_kernel(
    landed, b1, b2, b3, out1, out2, out3, a, stride, shard, landing, words, landings, room, counts, control, rank, rows, n,
    WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr,
    Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """`landed` [WORLD * rows, COLS], `b` [n, COLS] and `out` [1, WORLD * rows, n] are TMA descriptors of the blocks
    of a tile. `b` and `out` have one descriptor per part.
    """
    epoch = gl.load(control + EPOCH)
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    b = (b1, b2, b3)
    out = (out1, out2, out3)
    n_tiles = gl.cdiv(n, BLOCK_N)
    buffers, stagings = allocate(landed, out1, 2, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)
    fence_async_shared()
    exchange = (a, stride, shard, landing, words, landings, room, counts, control)
    # The gathered A is treated as one shard, because all its rows lie in one place.
    share = (gl.cdiv(WORLD * rows, BLOCK_M) * n_tiles, 0, WORLD * rows, COLS, n_tiles)
    goal = epoch * gl.num_programs(0)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (exchange_words, (exchange, rank, epoch, rows, WORLD, COLS, K_GROUPS, TARGET)),
                (multiply_tiles, (0, out, stagings, buffers, share, 1, False, GROUP_M, True, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 1, 1],
            [168, 96, 96],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (exchange_words, (exchange, rank, epoch, rows, WORLD, COLS, K_GROUPS, TARGET)),
                (multiply_tiles, (0, out, stagings, buffers, share, 1, False, GROUP_M, True, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (multiply_tiles, (1, out, stagings, buffers, share, 1, False, GROUP_M, True, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 4, 1, 1],
            [160, 160, 64, 64],
        )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushWords(Kernel[AllGatherGemm]):
    rows: int
    landing: Tensor
    view_of_a: TensorDescriptor

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.views = Views(config, problem.dtype)
        self.room = rows * cols // 8
        self.words = context.heap.alloc((2 * world * self.room, 2), torch.int64).fill_(NOTHING)
        places = [context.heap.peer(self.words, (context.rank + hop) % world).data_ptr() for hop in range(1, world)]
        self.landings = torch.tensor(places or [0], dtype=torch.int64, device=self.words.device)
        self.counts = context.empty((config["k_groups"],), torch.int32).zero_()
        vars(self).update(self.landed(context.empty((world * rows, cols), context.dtype(problem))))
        self.constants = {
            "WORLD": world,
            "COLS": cols,
            "K_GROUPS": config["k_groups"],
            **self.views.constants,
            "DEPTH": config["block_k"] // BLOCK_K.value,
            "maxnreg": MOST_REGISTERS[self.views.groups],
        }

    def landed(self, landing: Tensor) -> dict[str, Any]:
        """Returns the attributes that depend on the rows: the view of the buffer `landing` [world size * rows, cols]
        with all shards, and the buffer itself.
        """
        return {"landing": landing, "rows": len(landing) // self.problem.world_size, "view_of_a": self.views.of_a(landing)}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        context = self.context
        context.launch(
            push_words_kernel,
            (context.processors,),
            self.view_of_a, *self.views.of_b(b), *self.views.of_out(out[None]),
            a, a.stride(0), len(a), self.landing, self.words, self.landings, self.room, self.counts, self.control, context.rank,
            self.rows, self.problem.n,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: each call takes the words that it sends and restores their markers."""
        return self.landed(self.landing[: smaller.world_size * smaller.shard_rows])
