"""The merge of partial results in plain torch: right on any machine, in any group, for any size. No Triton."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.heap.world import World
from autotax.nn.fallback import all_gather


class PlainMerge:
    """The collective library's all-gather, or with `scatter` its all-to-all, then torch's operators. Allocates what these do."""

    def __init__(self, world: World | None, *, scatter: bool = False, base: str = "e") -> None:
        self.world = world
        self.scatter = scatter
        self.to_e = math.log(2.0) if base == "2" else 1.0

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor, held: tuple[Tensor, Tensor] | None = None) -> None:
        """O [tokens, heads, head_dim] and LSE [tokens, heads] of this rank; see autotax.nn.DecodeMerge."""
        if held is not None:
            lse = without_empty_shards(lse, *held)
        o = o.view(-1, *o.shape[-2:])
        outs, sums = (each[None] for each in (o, lse)) if self.world is None else (self._exchanged(each) for each in (o, lse))
        sums = torch.where(sums.isfinite(), sums * self.to_e, -math.inf)
        top = sums.amax(0)
        weights = torch.exp(sums - torch.where(top == -math.inf, 0.0, top))
        total = weights.sum(0)
        shares = (weights / total.clamp_min(torch.finfo(torch.float32).tiny))[..., None]
        parts = torch.where(shares > 0, shares * outs.float(), 0.0)
        out.view(-1, *out.shape[-2:]).copy_(parts.sum(0))
        merged.view(-1, merged.shape[-1]).copy_((total.log() + top) / self.to_e)

    def _exchanged(self, mine: Tensor) -> Tensor:
        """What each rank has for this one: [ranks, tokens, heads, ...]."""
        assert self.world is not None
        ranks, (tokens, heads, *rest) = self.world.size, mine.shape
        if not self.scatter:
            gathered = mine.new_empty(ranks, *mine.shape)
            all_gather(gathered, mine.contiguous(), self.world.data)
            return gathered
        sent = mine.reshape(tokens, ranks, heads // ranks, *rest).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=self.world.data)
        return received


def without_empty_shards(lse: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
    """LSE [tokens, heads] with -inf for tokens of sequences of which a rank holds nothing, and for those behind the last one."""
    tokens = torch.arange(len(lse), device=lse.device, dtype=query_start_loc.dtype)
    sequence = torch.bucketize(tokens, query_start_loc[1:], right=True).clamp_max_(len(seq_lens) - 1)
    empty = (tokens >= query_start_loc[-1]) | (seq_lens[sequence] == 0)
    return torch.where(empty[:, None], -math.inf, lse)
