"""staged_pull: the first `comm` programs fetch the peers' shards, piece by piece, into a local buffer; the other
programs compute.

Each remote element crosses the links once, however many column blocks read it (unlike `pull`). The flags of the
pieces stay on this rank (unlike `push`).

Waits: `publish` (see `pull`) copies this rank's shard into the heap, signals every peer and never waits. A fetcher
waits only for the publishers of its source. A tile waits for the fetchers of its own rank, one K group of a chunk of
rows at a time. Fetchers have the low program ids. They join the GEMM where that saves a wave of tiles.

The published shard has two slots, chosen by the epoch's parity. An owner writes a slot again two calls later, after
every peer has published the call in between. A peer publishes that call after it has fetched the slot. The buffer has
one slot: only this rank writes and reads it, call after call in stream order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.gemm import columns_of, gather_gemm
from autotax.kernels.all_gather_gemm.products import views_of_b
from autotax.kernels.all_gather_gemm.pull import COPY_BLOCK, PUBLISH_PROGRAMS, publish
from autotax.kernels.all_gather_gemm.tiles import TileOptions, element_alignment
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, arithmetic, leave, signal, translate, wait
from autotax.operators.all_gather_gemm import AllGatherGemm

fetch_unit = arithmetic(tiling.push_unit)

FETCH_ELEMENTS = 16384
"""Elements that one program has in flight: a read takes longer than a write, so twice as many as in `push`."""


@triton.jit
def fetch_block(
    destination, source, row, row_end, col, col_end, stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """destination[row:row_end, col:col_end] = source[...], like `copy_block`, for a translated source.

    The source address comes from an integer. Without the alignment hint its loads would be two bytes wide.
    """
    size: tl.constexpr = destination.dtype.element_ty.primitive_bitwidth // 8
    col_end = tl.multiple_of(col_end, ALIGNED)
    for r in range(row, row_end, ROWS):
        for c in range(col, col_end, COLS):
            rows = (r + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            cols = (tl.multiple_of(c, ALIGNED) + tl.arange(0, COLS))[None, :]
            inside = (rows < row_end) & (cols < col_end)
            here = tl.multiple_of(destination + rows * stride + cols, (size, ALIGNED * size))
            there = tl.multiple_of(source + rows * stride + cols, (size, ALIGNED * size))
            tl.store(here, tl.load(there, mask=inside), mask=inside)


@triton.jit
def fetch_shards(
    published, buffer, bases, announced, flags, control, epoch, rank, rows, cols, publishers,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, PIECES: tl.constexpr, INTERLEAVED: tl.constexpr,
    COMM: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Copies the shards [rows, cols] of all peers into the buffer [WORLD, rows, cols]. A piece is some rows of one K
    group of a chunk; each gets one signal. The order is that of `push`: the order in which tiles need the pieces.
    """
    chunks = tl.cdiv(rows, CHUNK)
    parts = chunks * K_GROUPS
    size = rows * tl.cast(cols, tl.int64)
    slot = published + (epoch & 1) * size
    for unit in tl.range(tl.program_id(0), (WORLD - 1) * parts * PIECES, COMM, num_stages=1):
        what = fetch_unit(unit, parts, PIECES, WORLD, INTERLEAVED)
        part = (what // PIECES) % parts
        source = (rank + WORLD - what // PIECES // parts) % WORLD
        col, col_end = columns_of(part // chunks, cols, K_GROUPS)
        row = (part % chunks) * CHUNK + (what % PIECES) * (CHUNK // PIECES)
        row_end = tl.minimum(row + CHUNK // PIECES, rows)
        wait(announced + source, epoch * publishers, source, source, control, TARGET)
        shard = translate(slot, bases, rank, source)
        fetch_block(buffer + source * size, shard, row, row_end, col, col_end, cols, COPY_ROWS, COPY_COLS, ALIGNED)
        flag = (part // chunks * WORLD + source) * chunks + part % chunks
        signal(flags + flag, 1, TARGET, "gpu")  # only this rank reads the buffer


@triton.jit(do_not_specialize=["rank"])
def staged_pull_kernel(
    own, published, buffer, buffer_view, b, b_narrow, out, bases, announced, flags, control, rank, m, n, rows, cols, publishers,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, PIECES: tl.constexpr,
    COMM: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr, DIES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    fetches = tl.program_id(0) < COMM
    if fetches:
        fetch_shards(
            published, buffer, bases, announced, flags, control, epoch, rank, rows, cols, publishers,
            WORLD, CHUNK, K_GROUPS, PIECES, INTERLEAVED, COMM, COPY_ROWS, COPY_COLS, ALIGNED, TARGET,
        )  # fmt: skip
    # The interpreter runs programs one after another. There a fetcher must not go on to wait, or the next could not fetch.
    if (TARGET != "interpreter") | (not fetches):
        gather_gemm(
            own, buffer_view, (b, b_narrow), out, out, flags, bases, flags, control, rank, m, n, rows, cols, PIECES,
            WORLD, SHARD_K, False, False, 1, CHUNK, K_GROUPS, COMM, INTERLEAVED, GROUP_M, DIES, SPLITS,
            BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
        )  # fmt: skip
    leave(control, epoch, tl.num_programs(0), TARGET)


class StagedPull(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, rows, cols, dtype = problem.world_size, problem.shard_rows, problem.shard_cols, context.dtype(problem)
        self.published = context.heap.alloc((2, rows, cols), dtype)
        self.announced = context.flags(world)
        self.buffer = context.empty((world * rows, cols), dtype)
        self.flags = context.flags(world * config["k_groups"] * ceil_div(rows, config["chunk_rows"]))
        self.publishers = 1 if context.interpreted else PUBLISH_PROGRAMS
        self.copy_cols = min(1024, power_of_two(ceil_div(cols, config["k_groups"])))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, config, context, tiles = self.problem, self.config, self.context, self.tiles
        rows, cols, world = problem.shard_rows, problem.shard_cols, problem.world_size
        aligned, bases = element_alignment(problem), context.heap.bases
        context.launch(
            publish,
            (self.publishers,),
            a, self.published, bases, self.announced, self.control, context.rank, rows, cols,
            WORLD=world,
            BLOCK=COPY_BLOCK,
            ALIGNED=aligned,
            num_warps=8,
        )  # fmt: skip
        context.launch(
            staged_pull_kernel,
            (context.processors,),
            tiles.view_a(a), self.published, self.buffer, tiles.view_a(self.buffer), *views_of_b(tiles, b), out,
            bases, self.announced, self.flags, self.control,
            context.rank, problem.m, problem.n, rows, cols, self.publishers,
            WORLD=world,
            SHARD_K=problem.shard == "k",
            CHUNK=config["chunk_rows"],
            K_GROUPS=config["k_groups"],
            PIECES=config["pieces"],
            COMM=config["comm"],
            COPY_ROWS=FETCH_ELEMENTS // self.copy_cols,
            COPY_COLS=self.copy_cols,
            ALIGNED=aligned,
            DIES=config.values.get("dies", 1),
            **tiles.constants,
        )  # fmt: skip
