"""stream_k: sends like `push`, but shares the steps of the K loops evenly among the programs, so that no wave is half empty.

Work is done in rounds; in each, the steps of all its tiles, tile after tile, are cut into shares of equal length, one a program
(stream-K: Osama et al., arXiv 2301.03598). Whoever has the first steps of a tile finishes it: it waits for the partial
sums of those who have the others, each of whom has put it down first of all in that round, and adds them in one order.
`rounds` is
- `one`: all rows together, the own ones copied into the own inbox; B is read once, which counts when m is small;
- `two`: the own rows, then all others;
- `each`: the own rows, then shard after shard, as they arrive.

Who waits for whom: a program for the chunks of rows it reads, and the first program of a tile for those with lower ids that
share it. Comm programs never wait before their last write, and take a share of the last round only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.config import Config
from autotax.kernels.all_gather_gemm.gemm import grouped, product, remote_row, store_tile
from autotax.kernels.all_gather_gemm.push import COPY_ELEMENTS, push_shard
from autotax.kernels.all_gather_gemm.tiles import TileOptions, element_alignment
from autotax.kernels.context import Context
from autotax.kernels.operator import Operator
from autotax.kernels.primitives import EPOCH, arithmetic, leave, settle, wait
from autotax.problem import AllGatherGemm, ceil_div, power_of_two
from autotax.spaces import order

share_start = arithmetic(order.share_start)


@triton.jit
def wait_span(
    flags, first, end, rows, goal, control, CHUNK: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """Waits for the chunks that hold rows first ... end - 1 of gathered A."""
    chunks = tl.cdiv(rows, CHUNK)
    for source in tl.range(first // rows, (end - 1) // rows + 1, num_stages=1):
        start = tl.maximum(first - source * rows, 0)
        stop = tl.minimum(end - source * rows, rows)
        for chunk in tl.range(start // CHUNK, (stop - 1) // CHUNK + 1, num_stages=1):
            index = source * chunks + chunk
            wait(flags + index, goal, source, index, control, TARGET)


@triton.jit
def finish(
    acc, out, row, row_end, col, n, partials, done, control, rank, tile, first, last, steps, total, shares, share, epoch, turn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Puts down a partial sum, or completes a tile of which `acc` holds steps 0 ... last - 1 and stores it."""
    programs = tl.num_programs(0)
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if first > 0:
        slot = turn * programs + tl.program_id(0)
        tl.store(partials + slot.to(tl.int64) * (BLOCK_M * BLOCK_N) + at, acc)
        settle(TARGET)
        tl.atomic_add(done + slot, 1, sem="release", scope="gpu")
    else:
        end = (tile + 1) * tl.cast(steps, tl.int64)
        other = share + 1
        while (last < steps) & (share_start(tl.cast(other, tl.int64), total, shares) < end):
            if share_start(tl.cast(other, tl.int64), total, shares) < share_start(tl.cast(other + 1, tl.int64), total, shares):
                slot = turn * programs + programs - 1 - other
                wait(done + slot, epoch, rank, slot, control, TARGET)
                acc += tl.load(partials + slot.to(tl.int64) * (BLOCK_M * BLOCK_N) + at, cache_modifier=".cg")
            other += 1
        store_tile(out, acc, row, col, row_end, n, BLOCK_M, BLOCK_N)


@triton.jit
def work_round(
    a, base, a_rows, b, out, partials, done, flags, control, rank, m, n, rows, cols, m_tiles, epoch, goal, shares, turn,
    WORLD: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """This program's share of a round. KIND: 0 the own rows, 1 all rows together, 2 all rows of others, 3 those of the shard
    that comes over hop `turn`, the number of the round. `a` holds what is read from row `base` on, own rows or gathered ones; it has `a_rows` rows.
    """
    share = tl.num_programs(0) - 1 - tl.program_id(0)
    steps = tl.cdiv(cols, BLOCK_K)
    n_tiles = tl.cdiv(n, BLOCK_N)
    total = m_tiles * n_tiles * tl.cast(steps, tl.int64)
    start = share_start(tl.cast(share, tl.int64), total, shares)
    stop = share_start(tl.cast(share + 1, tl.int64), total, shares)
    while start < stop:
        tile = (start // steps).to(tl.int32)
        first = (start % steps).to(tl.int32)
        last = tl.minimum(steps, first + (stop - start)).to(tl.int32)
        place = grouped(tile, m_tiles, n_tiles, GROUP_M)
        band = place // n_tiles
        col = (place % n_tiles) * BLOCK_N
        if KIND == 0:
            at = band * BLOCK_M
            row = rank * rows + at
            shard_end = (rank + 1) * rows
        elif KIND == 1:
            at = base + band * BLOCK_M
            row = band * BLOCK_M
            shard_end = WORLD * rows
        else:
            blocks = tl.cdiv(rows, BLOCK_M)
            position = remote_row(band, blocks, WORLD, INTERLEAVED) if KIND == 2 else turn * blocks + band
            source = (rank + WORLD - position // blocks) % WORLD
            row = source * rows + (position % blocks) * BLOCK_M
            at = base + row
            shard_end = (source + 1) * rows
        if KIND > 0:  # for padding too: whoever does not wait for a peer could be two calls ahead of it
            wait_span(flags, row, tl.minimum(row + BLOCK_M, shard_end), rows, goal, control, CHUNK, TARGET)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = product(
            acc, a, at, a_rows, cols, first * BLOCK_K, tl.minimum(last * BLOCK_K, cols), b, col, n, 0, cols,
            BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, TARGET,
        )  # fmt: skip
        finish(
            acc, out, row, tl.minimum(shard_end, m), col, n, partials, done, control, rank, tile, first, last, steps, total, shares, share,
            epoch, turn, BLOCK_M, BLOCK_N, TARGET,
        )  # fmt: skip
        start += last - first


@triton.jit(do_not_specialize=["rank"])
def stream_kernel(
    a, own, inbox, inbox_view, b, out, bases, flags, partials, done, control, rank, m, n, rows, cols,
    WORLD: tl.constexpr, ROUNDS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr,
    COMM: tl.constexpr, COPY_ROWS: tl.constexpr, COPY_COLS: tl.constexpr, ALIGNED: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    programs = tl.num_programs(0)
    sends = tl.program_id(0) < COMM
    if sends:
        push_shard(
            a, inbox, bases, flags, epoch, rank, rows, cols,
            WORLD, ROUNDS == 1, CHUNK, 1, PIECES, INTERLEAVED, COMM, COPY_ROWS, COPY_COLS, ALIGNED, TARGET,
        )  # fmt: skip
    blocks = tl.cdiv(rows, BLOCK_M)
    base = (epoch & 1) * WORLD * rows
    goal = epoch * PIECES
    # Comm programs have lower ids than all others. In the interpreter, where they run first, they must not wait at all.
    late = TARGET != "interpreter"
    last_shares = programs if late else programs - COMM
    if ROUNDS == 1:
        if late | (not sends):
            work_round(
                inbox_view, base, 2 * WORLD * rows, b, out, partials, done, flags, control, rank, m, n, rows, cols,
                tl.cdiv(WORLD * rows, BLOCK_M), epoch, goal, last_shares, 0,
                WORLD, 1, CHUNK, INTERLEAVED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
            )  # fmt: skip
    else:
        if not sends:
            work_round(
                own, 0, rows, b, out, partials, done, flags, control, rank, m, n, rows, cols,
                blocks, epoch, goal, programs - COMM, 0,
                WORLD, 0, CHUNK, INTERLEAVED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
            )  # fmt: skip
        for turn in tl.range(1, ROUNDS, num_stages=1):
            joined = late & (turn == ROUNDS - 1)
            if joined | (not sends):
                work_round(
                    inbox_view, base, 2 * WORLD * rows, b, out, partials, done, flags, control, rank, m, n, rows, cols,
                    blocks * (WORLD - 1) // (ROUNDS - 1), epoch, goal, tl.where(joined, programs, programs - COMM), turn,
                    WORLD, 3 if WORLD == ROUNDS else 2, CHUNK, INTERLEAVED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TARGET,
                )  # fmt: skip
    leave(control, epoch, programs)


class StreamK(Operator[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.rounds = {"one": 1, "two": 2, "each": world}[config["rounds"]]
        self.inbox = context.heap.alloc((2 * world * rows, cols), context.dtype(problem))
        self.flags = context.flags(world * ceil_div(rows, config["chunk_rows"]))
        self.done = context.flags(self.rounds * context.processors)
        self.partials = context.empty((self.rounds * context.processors, config["block_m"] * config["block_n"]), torch.float32)
        self.copy_cols = min(1024, power_of_two(cols))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, config, context, tiles = self.problem, self.config, self.context, self.tiles
        context.launch(
            stream_kernel,
            (context.processors,),
            a, tiles.view_a(a), self.inbox, tiles.view_a(self.inbox), tiles.view_b(b), out,
            context.heap.bases, self.flags, self.partials, self.done, self.control,
            context.rank, problem.m, problem.n, problem.shard_rows, problem.shard_cols,
            WORLD=problem.world_size,
            ROUNDS=self.rounds,
            CHUNK=config["chunk_rows"],
            PIECES=config["pieces"],
            COMM=config["comm"],
            COPY_ROWS=COPY_ELEMENTS // self.copy_cols,
            COPY_COLS=self.copy_cols,
            ALIGNED=element_alignment(problem),
            **tiles.constants,
        )  # fmt: skip
