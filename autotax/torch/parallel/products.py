"""The two linear layers of tensor parallelism with sequence parallelism, and their gradients.

Each calls torch.ops.autotax.fused_*, which are opaque to compilers and run what is tuned, or torch's own; the backward too. One
collective is not fused: the column-parallel layer gathers its input again for the weight's gradient, which costs less memory
than to keep the gathered one from the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.torch import symm_mem  # noqa: F401 - declares torch.ops.autotax.fused_*

NO_SECOND = (
    "a backward is itself recorded (create_graph=True), and fused layers have no second derivative: "
    "leave it out, or use torch's own parallel style"
)


def _require_last() -> None:
    """Raises UsageError for a backward that is differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError(NO_SECOND)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    """A matrix of rows, those of dimension `dim` slowest."""
    return tensor.movedim(dim, 0).reshape(-1, tensor.shape[-1])


def _gathered(x: Tensor, dim: int, ranks: int, group_name: str) -> Tensor:
    """The rows of all ranks. Waits in stream order: nothing may overlap with kernels that wait for peers."""
    collectives = torch.ops._c10d_functional
    rows: Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(_rows(x, dim).contiguous(), ranks, group_name))
    return rows


class ColumnParallel(torch.autograd.Function):
    """gather(x) @ weight.T + bias: x [..., K] is this rank's part of dimension `dim`, weight [n, K] and bias [n] its own.

    Gives [..., n], whole along `dim`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group_name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group_name = dim, group_name
        _, (y,) = torch.ops.autotax.fused_all_gather_matmul(x, [weight.t()], dim, group_name, return_A=False)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _require_last()
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.autotax.fused_matmul_reduce_scatter(grad, weight, "sum", ctx.dim, ctx.group_name)
        if ctx.needs_input_grad[1]:
            ranks = grad.shape[ctx.dim] // x.shape[ctx.dim]
            grad_weight = _rows(grad, ctx.dim).t() @ _gathered(x, ctx.dim, ranks, ctx.group_name)
        if ctx.needs_input_grad[2]:
            grad_bias = _rows(grad, ctx.dim).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


class RowParallel(torch.autograd.Function):
    """The own part, along dimension `dim`, of the sum of x @ weight.T over the ranks, and bias: x [..., k] and weight [N, k] are
    this rank's columns, bias [N] is the same on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group_name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group_name = dim, group_name
        y: Tensor = torch.ops.autotax.fused_matmul_reduce_scatter(x, weight.t(), "sum", dim, group_name)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _require_last()
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        whole = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        gathered, (grad_x,) = torch.ops.autotax.fused_all_gather_matmul(grad, [weight], ctx.dim, ctx.group_name, return_A=whole)
        if ctx.needs_input_grad[1]:
            grad_weight = _rows(gathered, ctx.dim).t() @ _rows(x, ctx.dim)
        if ctx.needs_input_grad[2]:  # the whole of it, as every rank has the same bias
            grad_bias = _rows(gathered, ctx.dim).sum(0)
        return grad_x, grad_weight, grad_bias, None, None
