"""The operators that torch calls in place of its own. Each looks its plan up and runs the plan's kernel, or torch's operator.

They are also torch.ops.autotax.fused_*, which do not depend on `install`. Torch has no counterpart of `matmul_all_reduce`, which
servers compute at the end of attention and of each MLP.

A call without a kernel runs torch's implementation or a server's all-reduce. On GPUs those are torch's pipelined operators. Torch
has none for CPU ranks, where its definition of the operators by plain collectives runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import Tensor, is_grad_enabled

from autotax.nn.groups import on_device
from autotax.torch.calls import GATHER, REDUCE, SCATTER, GatherCall, ReduceCall, ScatterCall
from autotax.torch.plans import GRADIENT, plans_of
from autotax.torch.status import TORCH, count_of


def all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """gather(A) and gather(A) @ B for each B [k, n], like symm_mem::fused_all_gather_matmul.

    A [..., k] holds this rank's part of dimension `gather_dim`. Results have the layouts of torch's results.
    """
    if is_grad_enabled() and (A.requires_grad or any(B.requires_grad for B in Bs)):
        count_of(GATHER, "", TORCH, GRADIENT).calls += 1
        return torch_all_gather_matmul(A, Bs, gather_dim, group_name, return_A=return_A)
    plans = plans_of(group_name, A.device)
    key = (GATHER, A.shape, A.dtype, gather_dim, return_A, *[(B.shape, B.stride(), B.dtype) for B in Bs])
    plan = plans.known.get(key)
    if plan is None:
        plan = plans.plan(GATHER, key, lambda ranks: GatherCall.of(A, Bs, gather_dim, ranks, return_a=return_A))
    if not plan.counted():
        return torch_all_gather_matmul(A, Bs, gather_dim, group_name, return_A=return_A)
    assert isinstance(plan.asked, GatherCall)
    with on_device(A.device.index), plan.calls:
        return plan.asked.run(plan.kernel, A, Bs)


def matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """This rank's part along `scatter_dim` of the sum, or with "avg" the mean, of A @ B over the ranks, like
    symm_mem::fused_matmul_reduce_scatter. A [..., k] and B [k, n] are this rank's.
    """
    if is_grad_enabled() and (A.requires_grad or B.requires_grad):
        count_of(SCATTER, "", TORCH, GRADIENT).calls += 1
        return torch_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    plans = plans_of(group_name, A.device)
    key = (SCATTER, A.shape, A.dtype, scatter_dim, reduce_op, B.shape, B.stride(), B.dtype)
    plan = plans.known.get(key)
    if plan is None:
        plan = plans.plan(SCATTER, key, lambda ranks: ScatterCall.of(A, B, reduce_op, scatter_dim, ranks))
    if not plan.counted():
        return torch_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    assert isinstance(plan.asked, ScatterCall)
    with on_device(A.device.index), plan.calls:
        return plan.asked.run(plan.kernel, A, B)


def matmul_all_reduce(A: Tensor, B: Tensor, group_name: str, batch_invariant: bool = False) -> Tensor:
    """The sum of A @ B over the ranks, on every rank. A [..., k] and B [k, n] are this rank's.

    With `batch_invariant` a row of the result has the same bits however many rows there are: one config runs all calls. A call
    without a kernel is a product and the all-reduce of the group: torch's all-reduce, or one set by `reduce_by`.
    """
    if is_grad_enabled() and (A.requires_grad or B.requires_grad):
        count_of(REDUCE, "", TORCH, GRADIENT).calls += 1
        return torch_matmul_all_reduce(A, B, group_name)
    plans = plans_of(group_name, A.device)
    if batch_invariant and A.dim() > 1 and A.numel() > plans.invariant_rows * A.shape[-1]:
        parts = A.reshape(-1, A.shape[-1]).split(plans.invariant_rows)
        return torch.cat([matmul_all_reduce(part, B, group_name, True) for part in parts]).view(*A.shape[:-1], B.shape[1])
    key = (REDUCE, A.shape, A.dtype, B.shape, B.stride(), B.dtype, *["batch-invariant"] * batch_invariant)
    plan = plans.known.get(key)
    if plan is None:
        plan = plans.plan(REDUCE, key, lambda ranks: ReduceCall.of(A, B, ranks, batch_invariant))
    if not plan.counted():
        return torch_matmul_all_reduce(A, B, group_name)
    assert isinstance(plan.asked, ReduceCall)
    with on_device(A.device.index), plan.calls:
        return plan.asked.run(plan.kernel, A, B)


# Calls without a kernel.

_all_reduces: dict[str, Callable[[Tensor], Tensor]] = {}


def torch_all_gather_matmul(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Torch's symm_mem::fused_all_gather_matmul."""
    run = torch_symm_mem._fused_all_gather_matmul if a.is_cuda else torch_symm_mem._fused_all_gather_matmul_fallback
    return run(a, bs, gather_dim, group_name, return_A=return_A)  # type: ignore[arg-type]


def torch_matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Torch's symm_mem::fused_matmul_reduce_scatter."""
    if a.is_cuda:
        return torch_symm_mem._fused_matmul_reduce_scatter(a, b, reduce_op, scatter_dim, group_name)  # type: ignore[arg-type]
    if reduce_op not in ("sum", "avg"):
        raise ValueError("reduce_op must be sum or avg")
    # gloo has no average
    result = torch_symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "sum", scatter_dim, group_name)  # type: ignore[arg-type]
    if reduce_op == "avg":
        result = result / dist.distributed_c10d._resolve_process_group(group_name).size()  # type: ignore[arg-type]
    return result


def reduce_by(group_name: str, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Sets the all-reduce of a group for calls without a kernel. `all_reduce` may write into its argument."""
    _all_reduces[group_name] = all_reduce


def torch_matmul_all_reduce(a: Tensor, b: Tensor, group_name: str) -> Tensor:
    """A product, and then the all-reduce of its group."""
    product = torch.matmul(a, b)
    if all_reduce := _all_reduces.get(group_name):
        return all_reduce(product)
    dist.all_reduce(product, group=dist.distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]
    return product
