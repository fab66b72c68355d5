"""decomposed: A is gathered beside the vendor's products, each of which begins as soon as the rows that it reads are there.

How many products is a balance, few large ones are fast and many begin early. `products` is one of
- `one`: everything at once, when A is complete;
- `two`: the own shard first, then what lies below and above its rows (on the first and last rank these are one);
- `each`: shard by shard, as they arrive; `halves`: half a shard at a time.

Of each piece the copy engines send the upper rows, and a kernel of `comm` programs `share` eighths. Engines cost no processor
but reach two thirds of what the links carry, and start late; eight programs add the rest.

Who waits for whom: see `gather`. A flag of the engines is a copy of the ticket in which `open_slot` wrote this call's epoch;
stream order puts it behind its data. What is sent goes out before the own product, nearest reader first.
"""

from __future__ import annotations

from torch import Tensor

from autotax.config import Config
from autotax.kernels.all_gather_gemm.gather import await_pieces, open_slot, push_gather
from autotax.kernels.all_gather_gemm.tiles import element_alignment
from autotax.kernels.context import Context
from autotax.kernels.operator import Operator
from autotax.problem import AllGatherGemm, ceil_div, power_of_two
from autotax.spaces.order import Product, later_products, pieces_of

EIGHTHS = 8


class Decomposed(Operator[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols, rank = problem.world_size, problem.shard_rows, problem.shard_cols, context.rank
        self.engines, self.comm = config["share"] < EIGHTHS, config["comm"] if config["share"] else 0
        self.whole = config["products"] == "one"
        self.later = [Product((1, world), (0, 1), (0, world))] if self.whole else later_products(rank, world, config["products"])
        self.pieces = pieces_of(config["products"])
        self.piece_rows = ceil_div(rows, self.pieces)
        self.engine_rows = self.piece_rows * (EIGHTHS - config["share"]) // EIGHTHS
        self.inbox = context.heap.alloc((2, world, rows, cols), context.dtype(problem))
        self.pushed, self.copied = context.flags(world * self.pieces), context.flags(world * self.pieces)
        self.begun = context.flags(world)
        self.ticket = context.empty((1,), self.begun.dtype)
        self.peers = [(rank + hop) % world for hop in range(1, world)]
        self.engine_streams = context.streams(config["streams"] if self.engines else 0)
        # Alone with one product the kernel is on the way of everything else.
        self.kernel_streams = context.streams(1 if self.comm and (self.engines or not self.whole) else 0, urgent=True)
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        context, rank = self.context, self.context.rank
        slot = self.calls % 2
        self.calls += not context.dry
        inbox = self.inbox[slot]
        self.send(a, inbox, slot)
        if self.whole:
            if self.engines:
                context.copy(inbox[rank], a)
                self.await_pieces(self.later[0], last=True)
            shape = (self.problem.m, self.problem.k) if self.problem.shard == "k" else (-1, self.problem.k)
            context.matmul(inbox.view(shape)[: self.problem.m], b, out)
        else:
            self.multiply(a, rank * len(a), b, out)
            for product in self.later:
                self.await_pieces(product, last=product is self.later[-1])
                self.multiply(*self.rows_of(product, inbox), b, out)
        context.rejoin([*self.engine_streams, *self.kernel_streams])

    def send(self, a: Tensor, inbox: Tensor, slot: int) -> None:
        """Enqueues all sending, beside what follows unless what follows needs all of it."""
        context = self.context
        if self.engines:
            context.launch(
                open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, context.rank, slot,
                WORLD=self.problem.world_size, num_warps=1,
            )  # fmt: skip
        for stream in self.kernel_streams:
            with context.beside(stream):
                self.push(a, inbox, slot)
        if self.comm and not self.kernel_streams:
            self.push(a, inbox, slot)
        for lane, stream in enumerate(self.engine_streams):
            with context.beside(stream):
                for peer in self.peers[lane :: len(self.engine_streams)]:
                    self.copy_pieces(a, inbox[context.rank], peer)

    def copy_pieces(self, a: Tensor, landing: Tensor, peer: int) -> None:
        """Copies the engines' rows of each piece to a peer, a flag behind each."""
        heap, first_flag = self.context.heap, self.context.rank * self.pieces
        for piece in range(self.pieces):
            first = piece * self.piece_rows
            end = min(first + self.engine_rows, len(a))
            if first < end:
                self.context.copy(heap.peer(landing[first:end], peer), a[first:end])
            self.context.copy(heap.peer(self.copied[first_flag + piece : first_flag + piece + 1], peer), self.ticket)

    def push(self, a: Tensor, inbox: Tensor, slot: int) -> None:
        problem, context = self.problem, self.context
        waits = self.whole and not self.engines
        context.launch(
            push_gather,
            (self.comm + waits,),
            a, inbox, context.heap.bases, self.pushed, self.begun, self.ticket, self.control,
            context.rank, slot, problem.shard_rows, problem.shard_cols, self.piece_rows, self.engine_rows,
            WORLD=problem.world_size,
            SHARD_K=problem.shard == "k",
            WHOLE=waits,
            OPENED=self.engines,
            PIECES=self.pieces,
            COMM=self.comm,
            COPY_COLS=min(1024, power_of_two(problem.shard_cols)),
            ALIGNED=element_alignment(problem),
            num_warps=4 if context.interpreted else 16,
        )  # fmt: skip

    def await_pieces(self, product: Product, *, last: bool) -> None:
        context = self.context
        context.launch(
            await_pieces, (1,), self.copied, self.pushed, self.control, context.rank, *product.hops, *product.pieces,
            ENGINES=self.engines, COMM=self.comm, PIECES=self.pieces, LAST=last, WORLD=self.problem.world_size, num_warps=1,
        )  # fmt: skip

    def rows_of(self, product: Product, inbox: Tensor) -> tuple[Tensor, int]:
        """The rows of A that a product takes, and the first row of C that they make."""
        rows = self.problem.shard_rows
        first, end = product.sources[0] * rows, product.sources[1] * rows
        if self.pieces > 1:
            first, end = first + product.pieces[0] * self.piece_rows, min(first + product.pieces[1] * self.piece_rows, end)
        return inbox.view(-1, self.problem.shard_cols)[first:end], first

    def multiply(self, a: Tensor, row: int, b: Tensor, out: Tensor) -> None:
        """The rows of C from `row` on that some rows of A make; rows beyond m are padding."""
        rows = min(len(a), self.problem.m - row)
        if rows > 0:
            self.context.matmul(a[:rows], b, out[row : row + rows])
