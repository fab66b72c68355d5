"""The backward of the linear layers, as operators of torch.ops that torch.compile differentiates too.

With y = gather(x) @ W.T the gradient of x is reduce_scatter(dy @ W), and that of W is dy.T @ gather(x).
With y = reduce_scatter(x @ W.T) they are gather(dy) @ W and gather(dy).T @ x.
So each layer's backward for x is a call of a layer of the other kind, its `gradient`.

A loss is the sum of what the ranks compute, unless its input is the same on all: see LinearAllReduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.nn.base import module_of
from autotax.nn.custom_ops import TAGS, fake_gathered, fake_linear, library
from autotax.nn.fallback import reduce_scatter

NO_SECOND = "a backward is itself recorded (create_graph=True), and layers of autotax have no second derivative: leave it out"


@contextmanager
def _once(dy: Tensor | None) -> Iterator[None]:
    """A backward that is not differentiated again, and computes in the types of its tensors."""
    if torch.is_grad_enabled():
        raise UsageError(NO_SECOND)
    kind = "cpu" if dy is None else dy.device.type
    with torch.autocast(kind, enabled=False):
        yield


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _of_weight(dy: Tensor, x: Tensor, layout: str) -> Tensor:
    """The gradient of a weight [n, k], or with "kn" [k, n], for dy [..., n] and x [..., k]."""
    dy, x = _rows(dy), _rows(x).to(dy.dtype)
    return torch.mm(dy.t(), x) if layout == "nk" else torch.mm(x.t(), dy)


def _quietly(call: Callable[..., Any]) -> Callable[..., Any]:
    """What an operator runs: torch has noted what it differentiates, so the layer has nothing to record."""

    def run(*given: Any) -> Any:
        with torch.no_grad():
            return call(*given)

    return run


# All-Gather + GEMM.


def _gather(x: Tensor, weight: Tensor, module: int, keep: bool) -> tuple[Tensor, Tensor]:
    if keep:
        y, whole = module_of(module).run_gathered(x, weight)
        return y, whole
    return module_of(module).run(x, weight), weight.new_empty(0)


def _fake_gather(x: Tensor, weight: Tensor, module: int, keep: bool) -> tuple[Tensor, Tensor]:
    _ = module_of(module).gradient
    with torch.no_grad():
        return fake_gathered(x, weight, module) if keep else (fake_linear(x, weight, module), weight.new_empty(0))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.module, keep = inputs
    ctx.set_materialize_grads(False)
    ctx.kept = keep
    ctx.save_for_backward(output[1] if keep else x, weight)


def _gather_backward(ctx: Any, dy: Tensor | None, d_whole: Tensor | None) -> tuple[Any, ...]:
    (x, weight), layer = ctx.saved_tensors, module_of(ctx.module)
    dx = d_weight = None
    with _once(dy if dy is not None else d_whole):
        if ctx.needs_input_grad[0] and dy is not None:
            dx = torch.ops.autotax.linear_reduce_scatter(dy, weight, layer.gradient.handle)
        if ctx.needs_input_grad[0] and d_whole is not None:
            own = torch.ops.autotax.own_rows_of_sum(d_whole, ctx.module)
            dx = own if dx is None else dx + own
        if ctx.needs_input_grad[1] and dy is not None:
            whole = x if ctx.kept else torch.ops.autotax.all_gather_rows(x, ctx.module)
            d_weight = _of_weight(dy, whole, layer._layout)
    return dx, d_weight, None, None


# GEMM + Reduce-Scatter.


def _scatter(x: Tensor, weight: Tensor, module: int, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y: Tensor = module_of(module).run(x, weight, None, bias, residual)
    return y


def _fake_scatter(x: Tensor, weight: Tensor, module: int, *_: Tensor | None) -> Tensor:
    _ = module_of(module).gradient
    with torch.no_grad():
        return fake_linear(x, weight, module)


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, ctx.module, _, _ = inputs
    ctx.save_for_backward(x, weight)


def _scatter_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight), layer = ctx.saved_tensors, module_of(ctx.module)
    dx = d_weight = None
    with _once(dy):
        other = layer.gradient.handle
        if all(ctx.needs_input_grad[:2]):
            dx, whole = torch.ops.autotax.all_gather_linear_gathered(dy, weight, other)
        elif ctx.needs_input_grad[0]:
            dx = torch.ops.autotax.all_gather_linear(dy, weight, other)
        else:
            whole = torch.ops.autotax.all_gather_rows(dy, other)
        if ctx.needs_input_grad[1]:
            d_weight = _of_weight(whole, x, layer._layout)
        d_bias = None  # one bias of all ranks
        if ctx.needs_input_grad[3]:
            d_bias = torch.ops.autotax.sum_over_ranks(_rows(dy).sum(0), ctx.module)
    return dx, d_weight, None, d_bias, _of_residual(ctx, dy)


def _of_residual(ctx: Any, dy: Tensor) -> Tensor | None:
    return dy if ctx.needs_input_grad[4] else None


# GEMM + All-Reduce.


def _reduce_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight), layer = ctx.saved_tensors, module_of(ctx.module)
    dx = d_weight = None
    with _once(dy):
        if ctx.needs_input_grad[0]:
            dx = torch.matmul(dy, weight if layer._layout == "nk" else weight.t())
        if ctx.needs_input_grad[1]:
            d_weight = _of_weight(dy, x, layer._layout)
        d_bias = _rows(dy).sum(0) if ctx.needs_input_grad[3] else None
    return dx, d_weight, None, d_bias, _of_residual(ctx, dy)


# What a backward does besides.


def _all_gather_rows(x: Tensor, module: int) -> Tensor:
    layer = module_of(module)
    whole: Tensor = layer.gather(x.to(layer._dtype).contiguous())
    return whole


def _fake_all_gather_rows(x: Tensor, module: int) -> Tensor:
    layer = module_of(module)
    return x.new_empty(x.shape[0] * layer.world_size, *x.shape[1:], dtype=layer._dtype)


def _own_rows_of_sum(whole: Tensor, module: int) -> Tensor:
    layer = module_of(module)
    if layer._world is None:
        return whole.clone()
    own = whole.new_empty(whole.shape[0] // layer.world_size, *whole.shape[1:])
    if whole.numel():
        reduce_scatter(own, whole.contiguous(), layer._world.data)
    return own


def _fake_own_rows_of_sum(whole: Tensor, module: int) -> Tensor:
    return whole.new_empty(whole.shape[0] // module_of(module).world_size, *whole.shape[1:])


def _sum_over_ranks(x: Tensor, module: int) -> Tensor:
    total, world = x.clone(memory_format=torch.contiguous_format), module_of(module)._world
    if world is not None:
        dist.all_reduce(total, group=world.data)
    return total


def _fake_same(x: Tensor, module: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x, memory_format=torch.contiguous_format)


Rules = tuple[Callable[..., Any], Callable[..., Any]] | None
_TWO = "(Tensor x, Tensor weight, int module, Tensor? bias, Tensor? residual) -> Tensor"
_ONE = "(Tensor x, int module) -> Tensor"
_KEPT = "(Tensor x, Tensor weight, int module, bool keep) -> (Tensor, Tensor)"

for _schema, _run, _fake, _rules in (
    (f"all_gather_linear_recorded{_KEPT}", _gather, _fake_gather, (_gather_backward, _save_gather)),
    (f"linear_reduce_scatter_recorded{_TWO}", _scatter, _fake_scatter, (_scatter_backward, _save_both)),
    (f"linear_all_reduce_recorded{_TWO}", _scatter, _fake_scatter, (_reduce_backward, _save_both)),
    (f"all_gather_rows{_ONE}", _all_gather_rows, _fake_all_gather_rows, None),
    (f"own_rows_of_sum{_ONE}", _own_rows_of_sum, _fake_own_rows_of_sum, None),
    (f"sum_over_ranks{_ONE}", _sum_over_ranks, _fake_same, None),
):  # fmt: skip
    _name = _schema.split("(")[0]
    library.define(_schema, tags=TAGS)
    library.impl(_name, _quietly(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"autotax::{_name}", _fake, lib=library)
    if _rules is not None:
        _backward, _save = _rules
        torch.library.register_autograd(f"autotax::{_name}", _backward, setup_context=_save, lib=library)
