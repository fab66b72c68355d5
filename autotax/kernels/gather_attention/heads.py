"""heads: all tokens of some heads come together on each rank, the vendor's attention works on them, and its output goes back.

One all-to-all brings q, k and v of a rank's heads, another one returns the output. Each rank attends to the whole sequence at
once, so nothing is merged. Ranks exchange queries and outputs too, hence more bytes than keys alone where few KV heads serve many
query heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gather_attention.vendor import VendorAttention
from autotax.operators.gather_attention import GatherAttention, Part


class Heads(VendorAttention):
    KEEPS_LSE = False

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, kind = problem.world_size, context.dtype(problem)
        q_heads, kv_heads, dim = problem.q_heads // world, problem.kv_heads // world, problem.head_dim
        self.bounds = (0, q_heads), (q_heads, q_heads + kv_heads), (q_heads + kv_heads, q_heads + 2 * kv_heads)
        shape = world, problem.batch, problem.shard_len, q_heads + 2 * kv_heads, dim
        self.sent, self.received = context.empty(shape, kind), context.empty(shape, kind)
        self.whole = context.empty((problem.batch, problem.seq_len, q_heads + 2 * kv_heads, dim), kind)
        self.returned, self.arrived = (context.empty((*shape[:3], q_heads, dim), kind) for _ in range(2))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        context, problem, world = self.context, self.problem, self.problem.world_size
        for (first, end), tensor in zip(self.bounds, (q, k, v), strict=True):
            by_rank = tensor.view(problem.batch, problem.shard_len, world, end - first, problem.head_dim)
            context.copy(self.sent[..., first:end, :], by_rank.permute(2, 0, 1, 3, 4))
        context.all_to_all(self.received, self.sent)
        for shard, place in self.places(self.received):
            context.copy(place, shard)
        tokens = (0, problem.seq_len)
        everything = Part(context.rank, tokens, tokens, problem.mask == "causal")
        heads, keys, values = (self.whole[:, :, first:end] for first, end in self.bounds)
        o, _ = self.part(everything, heads, keys, values, None)
        for shard, place in self.places(self.returned, o):
            context.copy(shard, place)
        context.all_to_all(self.arrived, self.returned)
        by_rank = out.view(problem.batch, problem.shard_len, world, -1, problem.head_dim)
        context.copy(by_rank.permute(2, 0, 1, 3, 4), self.arrived)

    def places(self, by_rank: Tensor, whole: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Each chunk of tokens in a tensor by ranks, and its place in the whole sequence."""
        problem, length = self.problem, self.problem.chunk_len
        whole = self.whole if whole is None else whole
        return [
            (by_rank[rank, :, at * length :][:, :length], whole[:, chunk * length :][:, :length])
            for rank in range(problem.world_size)
            for at, chunk in enumerate(problem.chunks_of(rank))
        ]

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any]:
        """Any number of sequences and tokens: the collectives are called with the sizes of the call."""
        batch, tokens = smaller.batch, smaller.shard_len
        changed: dict[str, Any] = {
            name: memory.view(-1, *memory.shape[3:])[: batch * smaller.seq_len].view(-1, batch, tokens, *memory.shape[3:])
            for name, memory in vars(self).items()
            if name in ("sent", "received", "returned", "arrived")
        }
        flat = self.whole.view(-1, *self.whole.shape[2:])
        return changed | {"whole": flat[: batch * smaller.seq_len].view(batch, smaller.seq_len, *self.whole.shape[2:])}
