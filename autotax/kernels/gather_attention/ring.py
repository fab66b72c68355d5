"""The variant `ring`: K and V travel from rank to rank while each part is attended to, as in Ring Attention (arXiv 2310.01889)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gather_attention.vendor import Decomposed
from autotax.kernels.primitives import wait
from autotax.operators.gather_attention import GatherAttention


@triton.jit(do_not_specialize=["source"])
def await_shard(arrived, ticket, control, source, TARGET: tl.constexpr):
    """One program: waits until the keys of a rank have arrived in the call whose number is in the ticket.

    The count of awaited calls belongs to the stream of attention, which may be ahead.
    """
    wait(arrived + source, tl.load(ticket), source, source, control, TARGET)


class Ring(Decomposed):
    """Each rank sends its keys to the next one, and then those that it receives. So a rank uses the link to one other rank only.

    A rank attends to parts in the order of `decomposed`, which is that of their arrival.

    Waits: on the stream of copies a rank waits for keys before it sends them on. It has sent all that came earlier by then, its own
    keys first, for which it waits for nobody. So no ranks wait for each other in a circle. Every flag is raised, also for keys that
    no later rank needs.
    """

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.peers = self.peers[:1]

    def send(self, k: Tensor, v: Tensor, places: list[Tensor], peer: int) -> None:  # noqa: ARG002
        """Sends keys and values of all ranks but the next one, `peer`, to it, as they arrive."""
        context, rank, world = self.context, self.context.rank, self.problem.world_size
        slot = (self.calls - (not context.dry)) % 2  # `send_all` has counted this call
        for hop in range(world - 1):
            source = (rank - hop) % world
            shards = [k, v] if source == rank else self.places(slot, source)
            if source != rank:
                context.launch(await_shard, (1,), self.arrived, self.ticket, self.control, source, num_warps=1)
            ranges = [part for step in range(1, world - hop) for part in self.problem.keys_sent(source, (rank + step) % world)]
            if ranges:
                first, end = min(ranges)[0], max(end for _, end in ranges)
                for place, shard in zip(self.places(slot, source), shards, strict=True):
                    context.copy(context.heap.peer(place, peer)[:, first:end], shard[:, first:end])
            context.copy(context.heap.peer(self.arrived[source : source + 1], peer), self.ticket)
