"""pull: the GEMM loads remote rows of A inside its K loop, straight from the memory of their owner.

Waits: `publish` copies this rank's shard into the heap and signals every peer; a tile waits once for its source. The published
shard has two slots, chosen by the epoch's parity. The local L2 does not keep remote data, so this pays only while few column
blocks read each row block.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.gemm import TileOptions, element_alignment, gather_gemm, views_of_b
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel, around_the_border
from autotax.kernels.primitives import EPOCH, copy, leave, signal_all
from autotax.operators.all_gather_gemm import AllGatherGemm

PUBLISH_PROGRAMS = 64
COPY_BLOCK = 4096


@triton.jit(do_not_specialize=["rank"])
def publish(
    a, published, bases, flags, control, rank, rows, cols,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Copies this rank's shard into its slot; every program signals every peer once for its part."""
    epoch = tl.load(control + EPOCH)
    programs = tl.num_programs(0)
    size = rows * tl.cast(cols, tl.int64)
    part = tl.cdiv(size, programs * 1024) * 1024
    start = tl.program_id(0) * part
    copy(published + (epoch & 1) * size, a, start, tl.minimum(start + part, size), BLOCK, ALIGNED)
    signal_all(flags, rank, bases, rank, WORLD, False, TARGET)


@triton.jit(do_not_specialize=["rank"])
def pull_kernel(
    own, published, b, b_narrow, out, bases, flags, control, rank, m, n, rows, cols, signals,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr, DIES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    gather_gemm(
        own, published, (b, b_narrow), out, out, flags, bases, flags, control, rank, m, n, rows, cols, signals,
        WORLD, SHARD_K, True, False, 2, 1, 1, 0, INTERLEAVED, GROUP_M, DIES, SPLITS,
        BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
    )  # fmt: skip
    leave(control, epoch, tl.num_programs(0), TARGET)


class Pull(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        self.published = context.heap.alloc((2, problem.shard_rows, problem.shard_cols), context.dtype(problem))
        self.flags = context.flags(problem.world_size)
        self.publishers = 1 if context.interpreted else PUBLISH_PROGRAMS

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, context, tiles = self.problem, self.context, self.tiles
        rows, cols, world = problem.shard_rows, problem.shard_cols, problem.world_size
        bases = context.heap.bases
        context.launch(
            publish, (self.publishers,),
            a, self.published, bases, self.flags, self.control, context.rank, rows, cols,
            WORLD=world, BLOCK=COPY_BLOCK, ALIGNED=element_alignment(problem), num_warps=8,
        )  # fmt: skip
        context.launch(
            pull_kernel, (context.processors,),
            tiles.view_a(a), self.published, *views_of_b(tiles, b), out, bases, self.flags, self.control,
            context.rank, problem.m, problem.n, rows, cols, self.publishers,
            WORLD=world, SHARD_K=problem.shard == "k", ALIGNED=element_alignment(problem),
            DIES=self.config.values.get("dies", 1), **tiles.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any] | None:
        """The two slots are adjacent, so their border does not move."""
        rows, cols = smaller.shard_rows, smaller.shard_cols
        published = around_the_border(self.published, rows * cols)
        return None if published is None else {"published": published.view(2, rows, cols)}
