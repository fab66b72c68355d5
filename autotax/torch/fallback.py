"""Torch's own implementations, and a server's own all-reduce: what runs a call that is not taken.

On GPUs those are torch's pipelined operators. For CPU ranks torch has none, but says what the operators compute by plain
collectives; that is what runs there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

_all_reduces: dict[str, Callable[[Tensor], Tensor]] = {}


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
        result = result / dist.distributed_c10d._resolve_process_group(group_name).size()  # type: ignore[arg-type]
    return result


def reduce_by(group_name: str, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Sums over a group by this function, which may write into its argument, where nothing tuned does."""
    _all_reduces[group_name] = all_reduce


def matmul_all_reduce(a: Tensor, b: Tensor, group_name: str) -> Tensor:
    """A product, and then the all-reduce of its group."""
    product = torch.matmul(a, b)
    if all_reduce := _all_reduces.get(group_name):
        return all_reduce(product)
    dist.all_reduce(product, group=dist.distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]
    return product
