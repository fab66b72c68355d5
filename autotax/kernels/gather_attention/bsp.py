"""bsp: the bulk-synchronous baseline. The collective library gathers K and V, then the vendor's attention works on all of them.

No library of torch masks queries that begin behind the first key. So a causal rank attends to its own keys causally and to those
of each other rank without a mask (see `GatherAttention.parts`), and the results are merged.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gather_attention.library import Partial
from autotax.kernels.gather_attention.vendor import VendorAttention
from autotax.operators.gather_attention import GatherAttention, Part


class Bsp(VendorAttention):
    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shape = problem.world_size, problem.batch, problem.shard_len, problem.kv_heads, problem.head_dim
        self.gathered = context.empty((2, *shape), context.dtype(problem))
        ordered = problem.mask == "none" and problem.batch > 1
        self.ordered = context.empty((2, *shape) if ordered else (0,), self.gathered.dtype)

    def gather(self, k: Tensor, v: Tensor) -> None:
        """One call of the collective library for K and V. Libraries for CPU ranks need two calls."""
        context = self.context
        if not context.dry:
            both = dist._coalescing_manager(group=context.world.data, device=k.device) if k.is_cuda else nullcontext()
            with both:
                for gathered, shard in zip(self.gathered, (k, v), strict=True):
                    context.all_gather(gathered, shard)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:  # noqa: ARG002
        problem = self.problem
        self.gather(k, v)
        if problem.mask == "none":
            whole = self.gathered
            if problem.batch > 1:
                whole = self.ordered.view(2, problem.batch, problem.world_size, *k.shape[1:])
                self.context.copy(whole, self.gathered.transpose(1, 2))
            keys, values = whole.view(2, problem.batch, problem.seq_len, *k.shape[2:])
            everything = Part(self.context.rank, (0, problem.shard_len), (0, problem.seq_len), causal=False)
            o, self.lse = self.part(everything, q, keys, values, None)
            return o
        result: Partial | None = None
        for part in problem.parts(self.context.rank):
            keys, values = (k, v) if result is None else self.gathered[:, part.source]
            result = self.part(part, q, keys, values, result)
        assert result is not None
        o, self.lse = result
        return o

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any]:
        """Any number of sequences and tokens: the collective is called with the sizes of the call."""
        shape = 2, smaller.world_size, smaller.batch, smaller.shard_len, smaller.kv_heads, smaller.head_dim
        kept = {name: memory for name, memory in (("gathered", self.gathered), ("ordered", self.ordered)) if memory.numel()}
        return {name: memory.view(-1)[: math.prod(shape)].view(shape) for name, memory in kept.items()}
