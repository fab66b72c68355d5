"""copy_engine: the copy engines write this rank's shard into every peer's inbox in chunks, each followed by a flag. All
programs compute.

Waits: a tile waits for the flags of the chunks it reads. The inbox has one slot, because the addresses of a captured
copy are fixed. Before a rank writes, its `open_call` kernel waits until every peer has finished the previous call;
the last program of that call signals this. A flag is a copy of the ticket, the word in which `open_call` wrote this
call's epoch. Stream order puts the flag after its data.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.gemm import TileOptions, element_alignment, gather_gemm, views_of_b
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, leave, signal_all, wait
from autotax.operators.all_gather_gemm import AllGatherGemm


@triton.jit(do_not_specialize=["rank"])
def open_call(ticket, done, control, rank, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """Waits until all peers' inboxes are free, then writes the epoch into the ticket."""
    epoch = tl.load(control + EPOCH)
    for hop in tl.range(1, WORLD, num_stages=1):
        peer = (rank + hop) % WORLD
        wait(done + peer, epoch - 1, peer, peer, control, TARGET)
    tl.store(ticket, epoch)


@triton.jit(do_not_specialize=["rank"])
def consume_kernel(
    own, inbox_view, b, b_narrow, out, partials, finished, bases, flags, done, control, rank, m, n, rows, cols,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, CHUNK: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr, DIES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    gather_gemm(
        own, inbox_view, (b, b_narrow), out, partials, finished, bases, flags, control, rank, m, n, rows, cols, 1,
        WORLD, SHARD_K, False, False, 1, CHUNK, 1, 0, INTERLEAVED, GROUP_M, DIES, SPLITS,
        BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
    )  # fmt: skip
    if leave(control, epoch, tl.num_programs(0), TARGET):
        signal_all(done, rank, bases, rank, WORLD, False, TARGET)


class CopyEngine(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, rows, cols, rank = problem.world_size, problem.shard_rows, problem.shard_cols, context.rank
        heap = context.heap
        self.inbox = heap.alloc((world, rows, cols), context.dtype(problem))
        self.flags = context.flags(world * ceil_div(rows, config["chunk_rows"]))
        self.done = context.flags(world)
        self.partials, self.finished = self.tiles.parts(problem, config, context)
        self.ticket = context.empty((1,), self.flags.dtype)
        self.peers = [(rank + hop) % world for hop in range(1, world)]
        self.streams = context.streams(min(config["streams"], len(self.peers)))
        self.landings = [heap.peer(self.inbox[rank], peer) for peer in self.peers]
        self.arrivals = [heap.peer(self.flags.view(world, -1)[rank], peer) for peer in self.peers]

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, config, context, tiles = self.problem, self.config, self.context, self.tiles
        world = problem.world_size
        context.launch(open_call, (1,), self.ticket, self.done, self.control, context.rank, WORLD=world, num_warps=1)
        self.send(a)
        context.launch(
            consume_kernel, (context.processors,),
            tiles.view_a(a), tiles.view_a(self.inbox.view(-1, problem.shard_cols)), *views_of_b(tiles, b), out, self.partials, self.finished,
            context.heap.bases, self.flags, self.done, self.control,
            context.rank, problem.m, problem.n, problem.shard_rows, problem.shard_cols,
            WORLD=world, SHARD_K=problem.shard == "k", CHUNK=config["chunk_rows"], ALIGNED=element_alignment(problem),
            DIES=config.values.get("dies", 1), **tiles.constants,
        )  # fmt: skip
        context.rejoin(self.streams)

    def send(self, a: Tensor) -> None:
        """Enqueues the copies on side streams, chunk by chunk. The peer that reads first is served first."""
        chunk = self.config["chunk_rows"]
        for lane, stream in enumerate(self.streams):
            with self.context.beside(stream):
                for landing, arrival in zip(self.landings[lane :: len(self.streams)], self.arrivals[lane :: len(self.streams)], strict=True):
                    for index, rows in enumerate(a.split(chunk)):
                        self.context.copy(landing[index * chunk : index * chunk + len(rows)], rows)
                        self.context.copy(arrival[index : index + 1], self.ticket)

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: flags hold the epoch, and a rank writes when all peers have ended the last call."""
        world, rows, cols = smaller.world_size, smaller.shard_rows, smaller.shard_cols
        heap, rank = self.context.heap, self.context.rank
        inbox = self.inbox.view(-1)[: world * rows * cols].view(world, rows, cols)
        flags = self.flags[: world * ceil_div(rows, self.config["chunk_rows"])]
        return {
            "inbox": inbox,
            "flags": flags,
            "landings": [heap.peer(inbox[rank], peer) for peer in self.peers],
            "arrivals": [heap.peer(flags.view(world, -1)[rank], peer) for peer in self.peers],
        }
