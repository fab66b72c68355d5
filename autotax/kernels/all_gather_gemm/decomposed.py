"""decomposed: the copy engines write the own shard into every peer's inbox, the vendor's library multiplies. No SM copies.

Who waits for whom: see `gather`. `open_slot` waits until the slot is free at all peers; a flag is a copy of the ticket in which
it wrote this call's epoch, and stream order puts it behind its data. Copies go out before the own product, nearest reader first.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from autotax.config import Config
from autotax.kernels.all_gather_gemm.gather import open_slot
from autotax.kernels.all_gather_gemm.products import Products
from autotax.kernels.context import Context
from autotax.problem import AllGatherGemm


class Decomposed(Products):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rank, heap = problem.world_size, context.rank, context.heap
        self.ticket = context.empty((1,), self.arrived.dtype)
        self.beside = context.streams(config["streams"])
        peers = [(rank + hop) % world for hop in range(1, world)]
        shards = self.inbox.view(2, world, problem.shard_rows, problem.shard_cols)
        self.own = shards[:, rank]
        self.landings = [[heap.peer(shards[slot, rank], peer) for peer in peers] for slot in (0, 1)]
        self.arrivals = [heap.peer(self.arrived[rank : rank + 1], peer) for peer in peers]

    def send(self, a: Tensor, slot: int) -> Callable[[], None]:
        context, world = self.context, self.problem.world_size
        context.launch(
            open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, context.rank, slot, WORLD=world, num_warps=1
        )
        for lane, stream in enumerate(self.beside):
            with context.beside(stream):
                every = slice(lane, None, len(self.beside))
                for landing, arrival in zip(self.landings[slot][every], self.arrivals[every], strict=True):
                    context.copy(landing, a)
                    context.copy(arrival, self.ticket)
        if self.whole:
            context.copy(self.own[slot], a)
            self.await_shards(1, world, last=True)
        return lambda: context.rejoin(self.beside)
