"""decomposed: the copy engines send K and V to the other ranks, while the vendor's attention works on the keys that are here."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.push_gather import await_shards, open_slot
from autotax.kernels.context import Context
from autotax.kernels.gather_attention.bsp import VendorAttention
from autotax.kernels.kernel import Kernel
from autotax.operators.gather_attention import GatherAttention


class CopiedKeys(Kernel[GatherAttention]):
    """Keys and values that copy engines bring: the base of variants without a sending kernel.

    The inbox is [2, source, K or V, batch, tokens, kv_heads, head_dim]. A rank gets the keys that its queries see.

    Waits: as in `all_gather_gemm.push_gather`. Every rank raises the flags of all others in each call, even if it sends them no
    keys. Copies run on a stream of their own, and none waits for a kernel of attention.
    """

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rank = problem.world_size, context.rank
        shape = 2, world, 2, problem.batch, problem.shard_len, problem.kv_heads, problem.head_dim
        self.inbox = context.heap.alloc(shape, context.dtype(problem))
        self.arrived, self.begun = context.flags(world), context.flags(world)
        self.ticket = context.empty((1,), self.begun.dtype)
        self.peers = [(rank + hop) % world for hop in range(1, world)]
        self.beside = context.streams(1)
        self.calls = 0

    def send_all(self, k: Tensor, v: Tensor) -> int:
        """Enqueues all sends. Returns the slot of the inbox that this call uses. `context.rejoin` must follow."""
        context, rank = self.context, self.context.rank
        slot = self.calls % 2
        self.calls += not context.dry
        context.launch(
            open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, rank, slot,
            WORLD=self.problem.world_size, num_warps=1,
        )  # fmt: skip
        with context.beside(self.beside[0]):
            for peer in self.peers:
                self.send(k, v, self.inbox[slot, rank], peer)
        return slot

    def send(self, k: Tensor, v: Tensor, landing: Tensor, peer: int) -> None:
        """Copies the keys and values that a peer needs into its inbox, then the flag."""
        context, rank = self.context, self.context.rank
        for part in self.problem.parts(peer):
            if part.source == rank:
                keys = slice(*part.keys)
                for target, shard in zip(context.heap.peer(landing, peer), (k, v), strict=True):
                    context.copy(target[:, keys], shard[:, keys])
        context.copy(context.heap.peer(self.arrived[rank : rank + 1], peer), self.ticket)

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any] | None:
        """Any number of sequences and tokens: there is one flag per rank, and the host chooses where the two slots begin."""
        shape = smaller.world_size, 2, smaller.batch, smaller.shard_len, smaller.kv_heads, smaller.head_dim
        return {"inbox": self.inbox.view(2, -1)[:, : math.prod(shape)].view(2, *shape)}


class Decomposed(CopiedKeys, VendorAttention):
    """A rank first attends to its own keys, then to those of rank - 1, rank - 2 and so on, each as soon as they have arrived."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:  # noqa: ARG002
        context, problem, rank = self.context, self.problem, self.context.rank
        inbox = self.inbox[self.send_all(k, v)]
        own, *others = problem.parts(rank)
        whole = self.part(own, q, k, v, None)
        parts = {part.source: part for part in others}
        for hop in range(1, problem.world_size):
            source = (rank - hop) % problem.world_size
            context.launch(
                await_shards, (1,), self.arrived, self.control, rank, hop, hop + 1, 1,
                LAST=hop == problem.world_size - 1, WORLD=problem.world_size, num_warps=1,
            )  # fmt: skip
            if source in parts:
                keys, values = inbox[source]
                whole = self.part(parts[source], q, keys, values, whole)
        context.rejoin(self.beside)
        o, self.lse = whole
        return o
