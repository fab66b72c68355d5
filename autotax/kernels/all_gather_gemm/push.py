"""push: the first `comm` programs write this rank's shard into every peer's inbox, piece by piece; the other programs compute.

Waits: a tile waits for the chunks of rows that it reads, one K group at a time, so that it can begin before whole
rows have arrived. The sender signals each K group of a chunk `pieces` times. With `across` a rank also sends its
shard to itself, and tiles may span several shards; this suits few rows per rank. Comm programs never wait before
their last write, so every wait ends. After that they join the GEMM where this saves a wave of tiles.

The inbox has two slots, chosen by the epoch's parity. `docs/memory-model.md` says why no slot is written too early.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.gemm import TileOptions, columns_of, element_alignment, gather_gemm, views_of_b
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel, around_the_border
from autotax.kernels.primitives import (
    EPOCH,
    MOST_DIES,
    arithmetic,
    copy_block,
    die_of_program,
    flag_address,
    leave,
    signal,
    signal_of_die,
    translate,
)
from autotax.operators.all_gather_gemm import AllGatherGemm

chiplet = arithmetic(tiling.chiplet)
push_unit = arithmetic(tiling.push_unit)

COPY_ELEMENTS = 8192
"""Elements that one program moves at a time: 16 KiB of bf16. With smaller blocks a few programs cannot keep a link busy."""


@triton.jit
def push_shard(
    a, inbox, bases, flags, epoch, rank, rows, cols,
    WORLD: tl.constexpr, ALL: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, PIECES: tl.constexpr, INTERLEAVED: tl.constexpr,
    COMM: tl.constexpr, COMM_DIES: tl.constexpr, BY_DIE: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLS: tl.constexpr,
    ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes this rank's shard [rows, cols] to all peers, and with ALL also to its own inbox. A piece is some rows of
    a K group of a chunk; each gets one signal.

    The first K group of every chunk is sent first, so that readers can begin with it. With COMM_DIES > 1 programs of one die send
    neighbouring pieces at a time. With BY_DIE they combine their signals; the words for that lie after the flags.
    """
    chunks = tl.cdiv(rows, CHUNK)
    parts = chunks * K_GROUPS
    landing = inbox + ((epoch & 1) * WORLD + rank) * rows * tl.cast(cols, tl.int64)
    sender = tl.program_id(0)
    if COMM_DIES > 1:
        sender = chiplet(sender, COMM, COMM_DIES)
    for unit in range(sender, (WORLD - 1 + ALL) * parts * PIECES, COMM):
        what = push_unit(unit, parts, PIECES, WORLD + ALL, INTERLEAVED)
        part = (what // PIECES) % parts
        peer = (rank + what // PIECES // parts) % WORLD
        col, col_end = columns_of(part // chunks, cols, K_GROUPS)
        row = (part % chunks) * CHUNK + (what % PIECES) * (CHUNK // PIECES)
        row_end = tl.minimum(row + CHUNK // PIECES, rows)
        copy_block(translate(landing, bases, rank, peer), a, row, row_end, col, col_end, cols, cols, COPY_ROWS, COPY_COLS, ALIGNED)
        flag = (part // chunks * WORLD + rank) * chunks + part % chunks
        if BY_DIE:
            die = die_of_program(COMM_DIES, TARGET)
            pending = flags + WORLD * parts + (die * WORLD + peer) * parts + part
            signal_of_die(flag_address(flags, flag, bases, rank, peer), pending, TARGET)
        else:
            signal(flag_address(flags, flag, bases, rank, peer), 1, TARGET, "sys")


@triton.jit(do_not_specialize=["rank"])
def push_kernel(
    a, own, inbox, inbox_view, b, b_narrow, out, partials, finished, bases, flags, control, rank, m, n, rows, cols,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, ALL: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, PIECES: tl.constexpr,
    COMM: tl.constexpr, COMM_DIES: tl.constexpr, BY_DIE: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLS: tl.constexpr,
    ALIGNED: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr, DIES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    sends = tl.program_id(0) < COMM
    if sends:
        push_shard(
            a, inbox, bases, flags, epoch, rank, rows, cols,
            WORLD, ALL, CHUNK, K_GROUPS, PIECES, INTERLEAVED, COMM, COMM_DIES, BY_DIE, COPY_ROWS, COPY_COLS, ALIGNED, TARGET,
        )  # fmt: skip
    # The interpreter runs programs one after another. There a sender must not go on to wait, or the next could not send.
    if (TARGET != "interpreter") | (not sends):
        gather_gemm(
            own, inbox_view, (b, b_narrow), out, partials, finished, bases, flags, control, rank, m, n, rows, cols, PIECES,
            WORLD, SHARD_K, False, ALL, 2, CHUNK, K_GROUPS, COMM, INTERLEAVED, GROUP_M, DIES, SPLITS,
            BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
        )  # fmt: skip
    leave(control, epoch, tl.num_programs(0), TARGET)


class Push(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.inbox = context.heap.alloc((2 * world * rows, cols), context.dtype(problem))
        self.by_die = config.values.get("signals") == "die"
        flags = world * config["k_groups"] * ceil_div(rows, config["chunk_rows"])
        self.flags = context.flags(flags * (1 + MOST_DIES * self.by_die))
        self.partials, self.finished = self.tiles.parts(problem, config, context)
        self.copy_cols = min(1024, power_of_two(ceil_div(cols, config["k_groups"])))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, config, context, tiles = self.problem, self.config, self.context, self.tiles
        context.launch(
            push_kernel, (context.processors,),
            a, tiles.view_a(a), self.inbox, tiles.view_a(self.inbox), *views_of_b(tiles, b), out, self.partials, self.finished,
            context.heap.bases, self.flags, self.control,
            context.rank, problem.m, problem.n, problem.shard_rows, problem.shard_cols,
            WORLD=problem.world_size, SHARD_K=problem.shard == "k", ALL=config["across"], CHUNK=config["chunk_rows"],
            K_GROUPS=config["k_groups"], PIECES=config["pieces"], COMM=config["comm"],
            COMM_DIES=config.values.get("comm_dies", 1), BY_DIE=self.by_die, COPY_ROWS=COPY_ELEMENTS // self.copy_cols,
            COPY_COLS=self.copy_cols, ALIGNED=element_alignment(problem), DIES=config.values.get("dies", 1),
            **tiles.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any] | None:
        """Flags count signals, so a call must raise all of them. Fewer rows are supported only with the same number of chunks."""
        chunk, world, rows, cols = self.config["chunk_rows"], smaller.world_size, smaller.shard_rows, smaller.shard_cols
        if ceil_div(rows, chunk) != ceil_div(self.problem.shard_rows, chunk):
            return None
        inbox = around_the_border(self.inbox, world * rows * cols)
        return None if inbox is None else {"inbox": inbox.view(2 * world * rows, cols)}


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
    """One kernel of `comm` programs pushes this rank's shard into every peer's inbox, another computes and polls.

    A comparison with `push` shows what a single kernel saves: a launch, and senders that become idle. With `beside` 1 the two
    kernels run side by side, else one after the other.

    Waits: the GEMM waits like `push`, for the push kernels of its peers, which do not wait. Every push kernel can run whatever
    the GEMMs do. Side by side, the GEMM is launched with `comm` fewer programs, so that processors stay free for the senders even
    if the GEMM begins first.

    The two kernels leave a call together: the epoch advances only when all programs of both have left. This is needed because the
    GEMM uses nothing of this rank's push kernel, so it may end before the push kernel has begun. The inbox has two slots, see
    `push`: a rank begins to send when both its kernels have finished the previous call.
    """

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.inbox = context.heap.alloc((2 * world * rows, cols), context.dtype(problem))
        self.flags = context.flags(world * config["k_groups"] * ceil_div(rows, config["chunk_rows"]))
        self.copy_cols = min(1024, power_of_two(ceil_div(cols, config["k_groups"])))
        self.beside = context.streams(1, urgent=True) if config["beside"] else []
        self.computing = context.processors - (config["comm"] if config["beside"] else 0)
        self.constants = {"WORLD": world, "CHUNK": config["chunk_rows"], "K_GROUPS": config["k_groups"]}

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
                sending_kernel, (config["comm"],),
                a, self.inbox, context.heap.bases, self.flags, self.control,
                context.rank, problem.shard_rows, problem.shard_cols, self.programs,
                PIECES=config["pieces"], INTERLEAVED=self.tiles.constants["INTERLEAVED"], COMM=config["comm"],
                COPY_ROWS=COPY_ELEMENTS // self.copy_cols, COPY_COLS=self.copy_cols, ALIGNED=element_alignment(problem),
                num_warps=PUSH_WARPS, **self.constants,
            )  # fmt: skip

    def compute(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, context, tiles = self.problem, self.context, self.tiles
        context.launch(
            polling_kernel, (self.computing,),
            tiles.view_a(a), tiles.view_a(self.inbox), *views_of_b(tiles, b), out,
            context.heap.bases, self.flags, self.control,
            context.rank, problem.m, problem.n, problem.shard_rows, problem.shard_cols, self.config["pieces"], self.programs,
            SHARD_K=problem.shard == "k", ALIGNED=element_alignment(problem), **self.constants,
            DIES=self.config.values.get("dies", 1), **tiles.constants,
        )  # fmt: skip
