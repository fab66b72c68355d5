"""Collectives of the library on tensors, by the names of every torch: version 2.13 renamed them and warns of the old names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Concatenates the shards of all ranks in `gathered`. Moves bytes, whatever the dtype."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(gathered.view(-1).view(torch.uint8), shard.reshape(-1).view(torch.uint8), group=group)


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Sums `whole` over the ranks and scatters the sum along the first dimension: each rank receives its part in `own`."""
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    scatter(own, whole, group=group)
