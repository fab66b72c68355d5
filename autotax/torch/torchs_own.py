"""Torch's own implementations: what runs a call that is not taken.

On GPUs those are torch's pipelined operators. For CPU ranks torch has none, but says what the operators compute by plain
collectives; that is what runs there.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor


def all_gather_matmul(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Torch's symm_mem::fused_all_gather_matmul."""
    run = symm_mem._fused_all_gather_matmul if a.is_cuda else symm_mem._fused_all_gather_matmul_fallback
    return run(a, bs, gather_dim, group_name, return_A=return_A)  # type: ignore[arg-type]


def matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Torch's symm_mem::fused_matmul_reduce_scatter."""
    if a.is_cuda:
        return symm_mem._fused_matmul_reduce_scatter(a, b, reduce_op, scatter_dim, group_name)  # type: ignore[arg-type]
    if reduce_op not in ("sum", "avg"):
        raise ValueError("reduce_op must be sum or avg")
    # gloo knows no average
    result = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "sum", scatter_dim, group_name)  # type: ignore[arg-type]
    if reduce_op == "avg":
        result = result / torch.distributed.get_world_size(torch.distributed.distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]
    return result
