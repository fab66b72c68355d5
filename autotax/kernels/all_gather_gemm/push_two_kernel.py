"""push_two_kernel: one kernel of `comm` programs pushes this rank's shard into every peer's inbox, another computes
and polls.

A comparison with `push` shows what a single kernel saves: a launch, and senders that become idle. With `beside` 1 the
two kernels run side by side, else one after the other.

Waits: the GEMM waits like `push`, for the push kernels of its peers, which do not wait. Every push kernel can run
whatever the GEMMs do. Side by side, the GEMM is launched with `comm` fewer programs, so that processors stay free for
the senders even if the GEMM begins first.

The two kernels leave a call together: the epoch advances only when all programs of both have left. This is needed
because the GEMM uses nothing of this rank's push kernel, so it may end before the push kernel has begun. The inbox
has two slots, see `push`: a rank begins to send when both its kernels have finished the previous call.
"""

from __future__ import annotations

from contextlib import nullcontext

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_gather_gemm.gemm import gather_gemm
from autotax.kernels.all_gather_gemm.products import views_of_b
from autotax.kernels.all_gather_gemm.push import COPY_ELEMENTS, push_shard
from autotax.kernels.all_gather_gemm.tiles import TileOptions, element_alignment
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, leave
from autotax.operators.all_gather_gemm import AllGatherGemm

PUSH_WARPS = 8


@triton.jit(do_not_specialize=["rank"])
def sending_kernel(
    a, inbox, bases, flags, control, rank, rows, cols, programs,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, PIECES: tl.constexpr, INTERLEAVED: tl.constexpr,
    COMM: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Sends this rank's shard. `programs` is the number of programs of both kernels, here and below."""
    epoch = tl.load(control + EPOCH)
    push_shard(
        a, inbox, bases, flags, epoch, rank, rows, cols,
        WORLD, False, CHUNK, K_GROUPS, PIECES, INTERLEAVED, COMM, 1, False, COPY_ROWS, COPY_COLS, ALIGNED, TARGET,
    )  # fmt: skip
    leave(control, epoch, programs, TARGET)


@triton.jit(do_not_specialize=["rank"])
def polling_kernel(
    own, inbox_view, b, b_narrow, out, bases, flags, control, rank, m, n, rows, cols, signals, programs,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr, DIES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes tiles. It polls per source, chunk of rows and K group."""
    epoch = tl.load(control + EPOCH)
    gather_gemm(
        own, inbox_view, (b, b_narrow), out, out, flags, bases, flags, control, rank, m, n, rows, cols, signals,
        WORLD, SHARD_K, False, False, 2, CHUNK, K_GROUPS, 0, INTERLEAVED, GROUP_M, DIES, SPLITS,
        BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
    )  # fmt: skip
    leave(control, epoch, programs, TARGET)


class PushTwoKernel(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.inbox = context.heap.alloc((2 * world * rows, cols), context.dtype(problem))
        self.flags = context.flags(world * config["k_groups"] * ceil_div(rows, config["chunk_rows"]))
        self.copy_cols = min(1024, power_of_two(ceil_div(cols, config["k_groups"])))
        self.beside = context.streams(1, urgent=True) if config["beside"] else []
        self.computing = context.processors - (config["comm"] if config["beside"] else 0)
        self.constants = {
            "WORLD": world,
            "CHUNK": config["chunk_rows"],
            "K_GROUPS": config["k_groups"],
        }

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.push(a)
        self.compute(a, b, out)
        self.context.rejoin(self.beside)

    @property
    def programs(self) -> int:
        """Programs of both kernels."""
        return self.config["comm"] + self.computing

    def push(self, a: Tensor) -> None:
        problem, config, context = self.problem, self.config, self.context
        with context.beside(self.beside[0]) if self.beside else nullcontext():
            context.launch(
                sending_kernel,
                (config["comm"],),
                a, self.inbox, context.heap.bases, self.flags, self.control,
                context.rank, problem.shard_rows, problem.shard_cols, self.programs,
                PIECES=config["pieces"],
                INTERLEAVED=self.tiles.constants["INTERLEAVED"],
                COMM=config["comm"],
                COPY_ROWS=COPY_ELEMENTS // self.copy_cols,
                COPY_COLS=self.copy_cols,
                ALIGNED=element_alignment(problem),
                num_warps=PUSH_WARPS,
                **self.constants,
            )  # fmt: skip

    def compute(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, context, tiles = self.problem, self.context, self.tiles
        context.launch(
            polling_kernel,
            (self.computing,),
            tiles.view_a(a), tiles.view_a(self.inbox), *views_of_b(tiles, b), out,
            context.heap.bases, self.flags, self.control,
            context.rank, problem.m, problem.n, problem.shard_rows, problem.shard_cols, self.config["pieces"], self.programs,
            SHARD_K=problem.shard == "k",
            ALIGNED=element_alignment(problem),
            **self.constants,
            DIES=self.config.values.get("dies", 1),
            **tiles.constants,
        )  # fmt: skip
