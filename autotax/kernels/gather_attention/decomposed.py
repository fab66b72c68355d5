"""decomposed: the copy engines send K and V to the other ranks, while the vendor's attention works on the keys that are here.

A rank first attends to its own keys, then to those of rank - 1, rank - 2 and so on, each as soon as they have arrived (see
`copies`). Each result is merged by its log-sum-exps into the first.
"""

from __future__ import annotations

from torch import Tensor

from autotax.kernels.all_gather_gemm.push_gather import await_shards
from autotax.kernels.gather_attention.copies import CopiedKeys
from autotax.kernels.gather_attention.vendor import VendorAttention


class Decomposed(CopiedKeys, VendorAttention):
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
