"""decomposed: A is gathered beside several calls of the vendor's GEMM. Each GEMM begins as soon as its rows have arrived.

The number of GEMMs is a trade-off: few large ones are fast, many small ones begin early. `products` is one of
- `one`: one GEMM when A is complete;
- `two`: this rank's shard first, then the rows below it, then the rows above it (the first and last rank have only
  one of these);
- `each`: shard by shard, as they arrive;
- `halves`: like `each`, but the last shard is cut in two pieces, because nothing hides its GEMM. For copy engines.

A kernel of `comm` programs sends the shards. If `comm` is 0 the copy engines do. Copy engines need no processor, but
they start late and reach two thirds of the link bandwidth.

With `one` product nothing else runs while A is gathered, so `warm` MiB of B are loaded into the L2 during that time.

Waits: see `push_gather`. A flag of the copy engines is a copy of the ticket in which `open_slot` wrote this call's epoch. All
sends are enqueued before the GEMM of this rank's shard. The peer that reads first is served first.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_gather_gemm.gemm import element_alignment
from autotax.kernels.all_gather_gemm.push_gather import WARM_COLS, await_shards, open_slot, push_gather, push_scaled
from autotax.kernels.all_gather_gemm.scaled_shards import Scaled, codes_of
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.scaled_product import ScaledProduct
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
        with context.beside(self.beside[0]) if self.beside else nullcontext():
            if self.comm:
                self.push(a, b, inbox, slot)
            else:
                context.launch(
                    open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, context.rank, slot,
                    WORLD=self.problem.world_size, num_warps=1,
                )  # fmt: skip
                self.copy(a, inbox[context.rank])

    def pieces(self, rows: int, last: bool) -> list[tuple[int, int]]:
        """Returns the rows (first, end) of each piece with a flag and a GEMM of its own. Only the last shard may have several."""
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
            push_gather, (max(programs, context.processors) if self.warm_cols else programs,),
            a, inbox, b, context.heap.bases, self.arrived[0], self.begun, self.control,
            context.rank, slot, problem.shard_rows, problem.shard_cols, problem.n, problem.k, self.warm_cols,
            WORLD=problem.world_size, SHARD_K=problem.shard == "k", WHOLE=self.whole, COMM=self.comm,
            COPY_COLS=min(1024, power_of_two(problem.shard_cols)), ALIGNED=element_alignment(problem),
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


class ScaledDecomposed(Scaled):
    """`decomposed` for e4m3, with one or two products of `scaled_product`.

    An A that has to be quantised is quantised first, or on the way if there is one product and a kernel gathers.
    """

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world = problem.world_size
        self.comm, self.whole = config["comm"], config["products"] == "one"
        self.later = later_products(context.rank, world, config["products"])
        self.inbox = context.heap.alloc((2, world, self.rows, problem.k), codes_of(problem))
        self.room = ceil_div(max(1, self.groups) * world * self.rows, 64) * 64
        self.scales = context.heap.alloc((2, self.room), torch.float32)
        self.arrived, self.begun = context.flags(world), context.flags(world)
        self.ticket = context.empty((1,), self.begun.dtype)
        self.peers = [(context.rank + hop) % world for hop in range(1, world)]
        self.beside = context.streams(1, urgent=True) if self.comm == 0 or not self.whole else []
        self.product = ScaledProduct(problem, config, problem.m, context)
        self.calls = 0

    def run(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        context, problem, rank, rows = self.context, self.problem, self.context.rank, self.rows
        slot = self.calls % 2
        self.calls += not context.dry
        inbox = self.inbox[slot]
        used = self.scales[slot, : max(1, self.groups) * problem.world_size * rows]
        on_the_way = self.quant != "none" and self.whole and self.comm > 0
        codes, scales = (a, self.quantised.static(scales_a)) if on_the_way else self.quantised(a, scales_a)
        self.send(codes, scales, inbox, used, slot)
        if self.whole:
            if self.comm == 0:
                context.copy(inbox[rank], codes)
                if self.groups:
                    context.copy(used.view(-1, problem.world_size, rows)[:, rank], scales.t())
                self.await_shards(1, problem.world_size, last=True)
            ordered = used.view(-1, problem.world_size * rows)
            whole = inbox.view(-1, problem.k)[: problem.m]
            self.product(whole, self.whole_scales(ordered[:, : problem.m], scales), b, scales_b, out)
        else:
            self.multiply(codes, scales, rank * rows, b, scales_b, out)
            by_source = used.view(problem.world_size, -1, rows)
            for product in self.later:
                self.await_shards(*product.hops, last=product is self.later[-1])
                first, end = product.sources
                step = 1 if self.groups > 1 else end - first  # scales of several shards are those of one matrix unless they are blocks
                for source in range(first, end, step):
                    some = self.whole_scales(by_source[source : source + step].view(-1, step * rows), scales)
                    self.multiply(inbox[source : source + step].view(-1, problem.k), some, source * rows, b, scales_b, out)
        context.rejoin(self.beside)

    def multiply(self, a: Tensor, scales_a: Tensor, row: int, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """Multiplies a shard into the rows of C from `row` on; rows beyond m are padding."""
        rows = min(len(a), self.problem.m - row)
        if rows > 0:
            cut = scales_a if self.problem.scales == "tensor" else scales_a[:rows]
            self.product(a[:rows], cut, b, scales_b, out[row : row + rows])

    def send(self, a: Tensor, scales: Tensor, inbox: Tensor, used: Tensor, slot: int) -> None:
        """Enqueues all sends, on a side stream unless the next product needs all of them."""
        context, world = self.context, self.problem.world_size
        with context.beside(self.beside[0]) if self.beside else nullcontext():
            if self.comm:
                self.push(a, scales, inbox, used, slot)
                return
            context.launch(
                open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, context.rank, slot, WORLD=world, num_warps=1
            )
            heap, rank = context.heap, context.rank
            landing = used.view(-1, world, self.rows)[:, rank] if self.whole else used.view(world, -1, self.rows)[rank]
            for peer in self.peers:
                context.copy(heap.peer(inbox[rank], peer), a)
                if self.groups:
                    context.copy(heap.peer(landing, peer), scales.t())
                context.copy(heap.peer(self.arrived[rank : rank + 1], peer), self.ticket)

    def push(self, a: Tensor, scales: Tensor, inbox: Tensor, used: Tensor, slot: int) -> None:
        """Sends by the kernel `push_scaled`, which quantises an A that is not yet e4m3."""
        problem, context, rows, world = self.problem, self.context, self.rows, self.problem.world_size
        quant = "none" if a.dtype == codes_of(problem) else self.quant
        word = torch.int16 if quant == "none" else torch.uint8
        words = problem.k // 2 if quant == "none" else problem.k
        context.launch(
            push_scaled, (1 + self.comm + (world - 1 if self.whole else 0),),
            a.view(word) if quant == "none" else a, scales, self.quantised.most, inbox.view(word), used, context.heap.bases, self.arrived, self.begun,
            self.control, context.rank, slot, rows, words, self.groups,
            rows if self.whole else max(1, self.groups) * rows, world * rows if self.whole else rows,
            WORLD=world, WHOLE=self.whole, COMM=self.comm, QUANT=quant, COLS=self.quantised.columns,
            COPY_COLS=min(1024, power_of_two(words)), ALIGNED=math.gcd(words, 16),
            num_warps=4 if context.interpreted else 16,
        )  # fmt: skip

    def await_shards(self, first_hop: int, end: int, *, last: bool) -> None:
        context = self.context
        context.launch(
            await_shards, (1,), self.arrived, self.control, context.rank, first_hop, end, self.comm or 1,
            LAST=last, WORLD=self.problem.world_size, num_warps=1,
        )  # fmt: skip

    def gathered_codes(self, a: Tensor, scales_a: Tensor) -> tuple[Tensor, Tensor]:
        """A [m, k] and its scales as the last call, of `a`, has gathered them, in workspaces. Not for scales of blocks."""
        slot, world, rank = (self.calls - 1) % 2, self.problem.world_size, self.context.rank
        inbox, scales = self.inbox[slot], self.scales[slot, : world * self.rows]
        if not self.whole:
            self.context.copy(inbox[rank], a)
            if self.groups:
                self.context.copy(scales[rank * self.rows :][: self.rows], scales_a.view(-1))
        return inbox.view(-1, self.problem.k)[: self.problem.m], self.whole_scales(scales.view(1, -1)[:, : self.problem.m], scales_a)

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: there is one flag per rank, and the host chooses where the two slots begin."""
        world, rows = smaller.world_size, smaller.shard_rows
        return {"rows": rows, "inbox": self.inbox.view(2, -1)[:, : world * rows * smaller.k].view(2, world, rows, smaller.k)}
