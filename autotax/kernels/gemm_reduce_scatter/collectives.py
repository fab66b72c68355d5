"""The collective library's sums, in the type of the tensors and in an order of its own: for the baseline and for peers."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from autotax.kernels.context import Context


def reduce_scatter(context: Context, received: Tensor, sent: Tensor) -> None:
    """`received` = the sum over the ranks of the own part of `sent`, whose first dimension is cut into equal parts."""
    if not context.dry:
        # torch 2.13 renamed it and warns of the old name.
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        scatter(received, sent, group=context.world.data)


def all_reduce(context: Context, tensor: Tensor) -> None:
    """`tensor` = the sum over the ranks."""
    if not context.dry:
        dist.all_reduce(tensor, group=context.world.data)
