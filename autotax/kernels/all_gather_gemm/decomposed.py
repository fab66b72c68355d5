"""decomposed: A is gathered beside several calls of the vendor's GEMM. Each GEMM begins as soon as its rows have
arrived.

The number of GEMMs is a trade-off: few large ones are fast, many small ones begin early. `products` is one of
- `one`: one GEMM when A is complete;
- `two`: this rank's shard first, then the rows below it, then the rows above it (the first and last rank have only
  one of these);
- `each`: shard by shard, as they arrive;
- `halves`: like `each`, but the last shard is cut in two pieces, because nothing hides its GEMM. For copy engines.

A kernel of `comm` programs sends the shards. If `comm` is 0 the copy engines do. Copy engines need no processor, but
they start late and reach two thirds of the link bandwidth.

With `one` product nothing else runs while A is gathered, so `warm` MiB of B are loaded into the L2 during that time.

Waits: see `push_gather`. A flag of the copy engines is a copy of the ticket in which `open_slot` wrote this call's
epoch. Stream order puts the flag after its data. All sends are enqueued before the GEMM of this rank's shard. The
peer that reads first is served first.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.all_gather_gemm.push_gather import WARM_COLS, await_shards, open_slot, push_gather
from autotax.kernels.all_gather_gemm.tiles import element_alignment
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.tiling import PIECES, last_pieces, later_products
from autotax.operators.all_gather_gemm import AllGatherGemm


class Decomposed(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols, rank = problem.world_size, problem.shard_rows, problem.shard_cols, context.rank
        self.comm, self.whole = config["comm"], config["products"] == "one"
        warm = min(problem.k, config["warm"] * 2**20 // (problem.n * problem.item_size))
        self.warm_cols = warm // WARM_COLS.value * WARM_COLS.value
        self.later = later_products(rank, world, config["products"])
        self.inbox = context.heap.alloc((2, world, rows, cols), context.dtype(problem))
        pieces = PIECES.get(config["products"], 1)
        self.arrived, self.begun = context.flags(pieces * world).view(pieces, world), context.flags(world)
        self.ticket = context.empty((1,), self.begun.dtype)
        self.peers = [(rank + hop) % world for hop in range(1, world)]
        # With one product everything else waits for the sending kernel, so it needs no side stream.
        self.beside = context.streams(1, urgent=True) if self.comm == 0 or not self.whole else []
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        context, rank = self.context, self.context.rank
        slot = self.calls % 2
        self.calls += not context.dry
        inbox = self.inbox[slot]
        self.send(a, b, inbox, slot)
        if self.whole:
            if self.comm == 0:
                context.copy(inbox[rank], a)
                self.await_shards(self.arrived[0], 1, self.problem.world_size, last=True)
            shape = (self.problem.m, self.problem.k) if self.problem.shard == "k" else (-1, self.problem.k)
            context.matmul(inbox.view(shape)[: self.problem.m], b, out)
        else:
            self.multiply(a, rank * len(a), b, out)
            for product in self.later:
                last = product is self.later[-1]
                first, end = product.sources
                rows = inbox[first:end].view(-1, self.problem.k)
                pieces = self.pieces(len(rows), last)
                for piece, (top, bottom) in enumerate(pieces):
                    self.await_shards(self.arrived[piece], *product.hops, last=last and piece == len(pieces) - 1)
                    self.multiply(rows[top:bottom], first * len(a) + top, b, out)
        context.rejoin(self.beside)

    def send(self, a: Tensor, b: Tensor, inbox: Tensor, slot: int) -> None:
        """Enqueues all sends. They run on a side stream unless the next GEMM needs all of them."""
        context = self.context
        if self.comm == 0:
            context.launch(
                open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, context.rank, slot,
                WORLD=self.problem.world_size, num_warps=1,
            )  # fmt: skip
        with context.beside(self.beside[0]) if self.beside else nullcontext():
            if self.comm:
                self.push(a, b, inbox, slot)
            else:
                self.copy(a, inbox[context.rank])

    def pieces(self, rows: int, last: bool) -> list[tuple[int, int]]:
        """Returns the rows (first, end) of each piece with a flag and a GEMM of its own. Only the last shard may have
        several.
        """
        return last_pieces(rows, self.config["products"]) if last else [(0, rows)]

    def copy(self, a: Tensor, landing: Tensor) -> None:
        """Sends by the copy engines, with a flag after each shard or piece."""
        context, heap, rank = self.context, self.context.heap, self.context.rank
        for peer in self.peers:
            for piece, (top, bottom) in enumerate(self.pieces(len(a), peer == self.peers[-1])):
                context.copy(heap.peer(landing[top:bottom], peer), a[top:bottom])
                context.copy(heap.peer(self.arrived[piece, rank : rank + 1], peer), self.ticket)

    def push(self, a: Tensor, b: Tensor, inbox: Tensor, slot: int) -> None:
        """Sends by the kernel `push_gather`."""
        problem, context = self.problem, self.context
        programs = 1 + self.comm + (problem.world_size - 1 if self.whole else 0)
        context.launch(
            push_gather,
            (max(programs, context.processors) if self.warm_cols else programs,),
            a, inbox, b, context.heap.bases, self.arrived[0], self.begun, self.control,
            context.rank, slot, problem.shard_rows, problem.shard_cols, problem.n, problem.k, self.warm_cols,
            WORLD=problem.world_size,
            SHARD_K=problem.shard == "k",
            WHOLE=self.whole,
            COMM=self.comm,
            COPY_COLS=min(1024, power_of_two(problem.shard_cols)),
            ALIGNED=element_alignment(problem),
            num_warps=4 if context.interpreted else 16,
        )  # fmt: skip

    def await_shards(self, arrived: Tensor, first_hop: int, end: int, *, last: bool) -> None:
        context = self.context
        context.launch(
            await_shards, (1,), arrived, self.control, context.rank, first_hop, end, self.comm or 1,
            LAST=last, WORLD=self.problem.world_size, num_warps=1,
        )  # fmt: skip

    def multiply(self, a: Tensor, row: int, b: Tensor, out: Tensor) -> None:
        """Multiplies some rows of A into the rows of C from `row` on; rows beyond m are padding."""
        rows = min(len(a), self.problem.m - row)
        if rows > 0:
            self.context.matmul(a[:rows], b, out[row : row + rows])

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: there is one flag per rank, and the host chooses where the two slots begin."""
        world, rows, cols = smaller.world_size, smaller.shard_rows, smaller.shard_cols
        return {"inbox": self.inbox.view(2, -1)[:, : world * rows * cols].view(2, world, rows, cols)}
