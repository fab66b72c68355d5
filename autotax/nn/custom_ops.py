"""torch.ops.autotax.*: the modules as torch.compile sees them, one opaque operator a call.

An operator finds its module by a handle, an integer. The weight is an argument, so that torch sees each tensor that is read.

The operators of recorded calls have a backward, which torch.compile also uses.
With y = gather(x) @ W.T the gradient of x is reduce_scatter(dy @ W), and that of W is dy.T @ gather(x).
With y = reduce_scatter(x @ W.T) they are gather(dy) @ W and gather(dy).T @ x.
So each layer's backward for x is a call of a layer of the other kind, its `gradient`.
The backward of gather + attention is the vendor's, part by part, on K and V that it gathers again, for ragged streams too.

The gradients are those of the sum of all ranks' losses, unless all ranks have the same output: see LinearAllReduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.heap.collectives import reduce_scatter
from autotax.nn.base import module_of
from autotax.nn.tensor_checks import IN_OPS, recorded

library = torch.library.Library("autotax", "FRAGMENT")
# Kernels need contiguous tensors: a compiler must pass tensors with the layouts of the trace.
TAGS = (torch.Tag.needs_fixed_stride_order,)
ADDENDS = ", Tensor? bias=None, Tensor? residual=None"
"""Row-parallel layers add these tensors to the sum in the kernel that stores it."""


def fake_linear(x: Tensor, weight: Tensor, module: int, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The result of a layer without values. Its type is the weight's: under autocast x may have another type."""
    layer = module_of(module)
    if torch.is_grad_enabled() and recorded(x, weight, bias, residual):
        raise UsageError(f"torch.ops has no backward for a compiled call; call the {type(layer).__name__} itself")
    return weight.new_empty(layer.shape_of(x.shape, layer.sides_of(weight)[1]))


def fake_gathered(x: Tensor, weight: Tensor, module: int) -> tuple[Tensor, Tensor]:
    """The product, and the gathered x."""
    whole = weight.new_empty(x.shape[0] * module_of(module).world_size, *x.shape[1:])
    return fake_linear(x, weight, module), whole


def _fake_merge(o: Tensor, lse: Tensor, module: int, *_: object) -> tuple[Tensor, Tensor]:
    made = module_of(module)
    shape = *o.shape[:-2], made.out_heads
    return o.new_empty(*shape, o.shape[-1], dtype=made._dtype), lse.new_empty(shape)


def _fake_norm(x: Tensor, module: Any, shape: Any) -> list[Tensor]:
    """The results of a norm module for rows of this shape."""
    return [x.new_empty(size, dtype=dtype) for size, dtype in module.forms(torch.Size(shape))[1].values()]


def fake_normed(x: Tensor, _: Tensor, norm_weight: Tensor, module: int, *__: object) -> list[Tensor]:
    layer = module_of(module)
    return _fake_norm(x, layer._norm[0], layer.shape_of(x.shape, len(norm_weight)))


def _flash_decode(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor, module: int, table: Tensor | None = None,
    starts: Tensor | None = None, scales: Tensor | None = None, sinks: Tensor | None = None,
) -> Any:  # fmt: skip
    return module_of(module).run(q, k, v, kv_lens, table, None, starts, scales, sinks, IN_OPS)


def _flash_decode_out(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor, out: Tensor, module: int, table: Tensor | None = None, *more: Tensor | None
) -> None:
    module_of(module).run(q, k, v, kv_lens, table, out, *(more or (None, None, None)), IN_OPS)


def _fake_decode(q: Tensor, _k: Tensor, _v: Tensor, _lens: Tensor, module: int, *_: object) -> Tensor:
    made = module_of(module)
    return q.new_empty(q.shape[0], made.out_heads, *q.shape[2:], dtype=made._dtype)


def _writing(call: Callable[..., Any]) -> Callable[..., None]:
    """An operator that writes into tensors and returns nothing."""

    def write(*arguments: Any) -> None:
        call(*arguments)

    return write


def _without_sums(made: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a norm of sums writes: all of a norm's results but the sums, which are its input."""
    return [*made[:1], *made[2:]]


# The backward of the linear layers.

NO_SECOND = "a backward is itself recorded (create_graph=True), and layers of autotax have no second derivative: leave it out"


@contextmanager
def _once(dy: Tensor | None) -> Iterator[None]:
    """A context for a backward: refuses a second derivative, and turns autocast off."""
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
    """Runs an operator without recording: torch has already saved the tensors for the backward."""

    def quiet(*arguments: Any) -> Any:
        with torch.no_grad():
            return call(*arguments)

    return quiet


# All-Gather + GEMM.


def _gather(x: Tensor, weight: Tensor, module: int, keep: bool) -> tuple[Tensor, Tensor]:
    if keep:
        y, whole = module_of(module).run_gathered(x, weight)
        return y, whole
    return module_of(module).run(x, weight), weight.new_empty(0)


def _fake_gather(x: Tensor, weight: Tensor, module: int, keep: bool) -> tuple[Tensor, Tensor]:
    _ = module_of(module).ready_gradient()
    with torch.no_grad():
        return fake_gathered(x, weight, module) if keep else (fake_linear(x, weight, module), weight.new_empty(0))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.module, keep = inputs
    ctx.set_materialize_grads(False)
    ctx.kept = keep
    ctx.save_for_backward(output[1] if keep else x, weight)


def _gather_backward(ctx: Any, dy: Tensor | None, d_whole: Tensor | None = None) -> tuple[Any, ...]:
    (x, weight), layer = ctx.saved_tensors, module_of(ctx.module)
    dx = d_weight = None
    with _once(dy if dy is not None else d_whole):
        if ctx.needs_input_grad[0] and dy is not None:
            dx = torch.ops.autotax.linear_reduce_scatter(dy, weight, layer.ready_gradient().handle)
        if ctx.needs_input_grad[0] and d_whole is not None:
            own = torch.ops.autotax.own_rows_of_sum(d_whole, ctx.module)
            dx = own if dx is None else dx + own
        if ctx.needs_input_grad[1] and dy is not None:
            whole = x if ctx.kept else torch.ops.autotax.all_gather_rows(x, ctx.module)
            d_weight = _of_weight(dy, whole, layer._layout)
    return dx, d_weight, None, None


# GEMM + Reduce-Scatter.


def _fake_scatter(x: Tensor, weight: Tensor, module: int, *_: Tensor | None) -> Tensor:
    _ = module_of(module).ready_gradient()
    with torch.no_grad():
        return fake_linear(x, weight, module)


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, ctx.module, _, _ = inputs
    ctx.save_for_backward(x, weight)


def _scatter_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight), layer = ctx.saved_tensors, module_of(ctx.module)
    dx = d_weight = None
    with _once(dy):
        other = layer.ready_gradient().handle
        if all(ctx.needs_input_grad[:2]):
            dx, whole = torch.ops.autotax.all_gather_linear_gathered(dy, weight, other)
        elif ctx.needs_input_grad[0]:
            dx = torch.ops.autotax.all_gather_linear(dy, weight, other)
        else:
            whole = torch.ops.autotax.all_gather_rows(dy, other)
        if ctx.needs_input_grad[1]:
            d_weight = _of_weight(whole, x, layer._layout)
        d_bias = None  # all ranks share one bias
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


BACKWARD = {"all_gather": _gather_backward, "reduce_scatter": _scatter_backward, "all_reduce": _reduce_backward}
"""The backward of each kind of layer."""


# Gather + attention.


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.lengths, ctx.module = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _fake_attention(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], *v.shape[-1:]), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _attention_backward(ctx: Any, d_o: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    with _once(d_o):
        return *torch.ops.autotax.gather_attention_gradients(d_o, *ctx.saved_tensors, ctx.lengths, ctx.module), None, None


# Collectives of a backward.


def _all_gather_rows(x: Tensor, module: int) -> Tensor:
    layer = module_of(module)
    whole: Tensor = layer.gather(x.to(layer._dtype).contiguous())
    return whole


def _own_rows_of_sum(whole: Tensor, module: int) -> Tensor:
    layer = module_of(module)
    if layer._world is None:
        return whole.clone()
    own = whole.new_empty(whole.shape[0] // layer.world_size, *whole.shape[1:])
    if whole.numel():
        reduce_scatter(own, whole.contiguous(), layer._world.data)
    return own


def _sum_over_ranks(x: Tensor, module: int) -> Tensor:
    total, world = x.clone(memory_format=torch.contiguous_format), module_of(module)._world
    if world is not None:
        dist.all_reduce(total, group=world.data)
    return total


Rules = tuple[Callable[..., Any], Callable[..., Any]]


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any], rules: Rules | None = None) -> None:
    """Makes an operator of torch.ops.autotax. `rules` are the backward of recorded calls, and what saves their tensors."""
    name = schema.split("(")[0]
    library.define(schema, tags=TAGS)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autotax::{name}", fake, lib=library)
    if rules is not None:
        backward, save = rules
        torch.library.register_autograd(f"autotax::{name}", backward, setup_context=save, lib=library)
    else:  # a layer records its calls itself
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")


Operator = tuple[str, Callable[..., Any], Callable[..., Any], Rules | None]
_MORE = "int module, Tensor? table=None, Tensor? starts=None, Tensor? scales=None, Tensor? sinks=None"
_HELD = "int module, Tensor? seq_lens=None, Tensor? query_start_loc=None"
_NORM = "int module, Tensor? residual=None, Tensor? scale=None"
_TWO = "(Tensor x, Tensor weight, int module, Tensor? bias, Tensor? residual) -> Tensor"
_QKV = "Tensor q, Tensor k, Tensor v"


def _nothing(*_: object, **__: object) -> None:
    """The shape function of operators that write into an argument and return nothing."""


# Implementations of the fastest calls name their arguments: a tuple to unpack, or a function between, costs 0.2 us.


def _run(x: Tensor, weight: Tensor, module: int, bias: Tensor | None = None, residual: Tensor | None = None) -> Any:
    return module_of(module).run(x, weight, None, bias, residual)


def _run_out(x: Tensor, weight: Tensor, out: Tensor, module: int, *added: Tensor | None) -> None:
    module_of(module).run(x, weight, out, *added)


_OPERATORS: tuple[Operator, ...] = (
    *(
        entry
        for name, more in (("all_gather_linear", ""), ("linear_reduce_scatter", ADDENDS), ("linear_all_reduce", ADDENDS))
        for entry in (
            (f"{name}(Tensor x, Tensor weight, int module{more}) -> Tensor", _run, fake_linear, None),
            (f"{name}_out(Tensor x, Tensor weight, Tensor(a!) out, int module{more}) -> ()", _run_out, _nothing, None),
        )
    ),
    (
        "all_gather_linear_gathered(Tensor x, Tensor weight, int module) -> (Tensor, Tensor)",
        lambda x, weight, module: module_of(module).run_gathered(x, weight),
        fake_gathered,
        None,
    ),
    (
        f"flash_decode({_QKV}, Tensor kv_lens, {_MORE}) -> Tensor",
        _flash_decode,
        _fake_decode,
        None,
    ),
    (f"flash_decode_out({_QKV}, Tensor kv_lens, Tensor(a!) out, {_MORE}) -> ()", _flash_decode_out, _nothing, None),
    (
        f"decode_merge(Tensor o, Tensor lse, {_HELD}) -> (Tensor, Tensor)",
        lambda o, lse, module, *held: module_of(module).run(o, lse, None, None, *held),
        _fake_merge,
        None,
    ),
    (
        f"decode_merge_out(Tensor o, Tensor lse, Tensor(a!) out, Tensor(b!) merged_lse, {_HELD}) -> ()",
        _writing(lambda o, lse, out, merged, module, *held: module_of(module).run(o, lse, out, merged, *held)),
        _nothing,
        None,
    ),
    (
        f"all_reduce_norm(Tensor x, Tensor weight, {_NORM}) -> Tensor[]",
        lambda x, weight, module, *more: list(module_of(module).run(x, weight, *more)),
        lambda x, _, module, *__: _fake_norm(x, module_of(module), x.shape),
        None,
    ),
    (
        f"linear_all_reduce_normed(Tensor x, Tensor weight, Tensor norm_weight, {_NORM}) -> Tensor[]",
        lambda x, weight, norm_weight, module, *more: list(module_of(module).in_one(x, weight, norm_weight, *more)),
        fake_normed,
        None,
    ),
    (
        "norm_of_sums(Tensor total, Tensor weight, int module, Tensor? scale=None) -> Tensor[]",
        lambda total, weight, module, *scale: _without_sums(module_of(module).of_sums(total, weight, *scale)),
        lambda total, _, module, *__: _without_sums(_fake_norm(total, module_of(module), total.shape)),
        None,
    ),
    (
        "all_reduce_norm_out(Tensor x, Tensor weight, Tensor(a!) out, Tensor(b!) residual_out, Tensor(c!)? scales_out, "
        f"{_NORM}) -> ()",
        _writing(
            lambda x, weight, out, residual_out, scales_out, module, residual=None, scale=None: module_of(module).run(
                x, weight, residual, scale, out, residual_out, scales_out
            )
        ),
        _nothing,
        None,
    ),
    (
        "all_gather_linear_recorded(Tensor x, Tensor weight, int module, bool keep) -> (Tensor, Tensor)",
        _quietly(_gather),
        _fake_gather,
        (_gather_backward, _save_gather),
    ),
    (f"linear_reduce_scatter_recorded{_TWO}", _quietly(_run), _fake_scatter, (_scatter_backward, _save_both)),
    (f"linear_all_reduce_recorded{_TWO}", _quietly(_run), _fake_scatter, (_reduce_backward, _save_both)),
    (
        f"gather_attention({_QKV}, int module) -> Tensor",
        lambda q, k, v, module: module_of(module).run(q, k, v),
        lambda q, _, v, __: q.new_empty(*q.shape[:-1], *v.shape[-1:]),
        None,
    ),
    (
        f"gather_attention_out({_QKV}, Tensor(a!) out, int module) -> ()",
        _writing(lambda q, k, v, out, module: module_of(module).run(q, k, v, out)),
        _nothing,
        None,
    ),
    (
        f"gather_attention_recorded({_QKV}, int[]? lengths, int module) -> (Tensor, Tensor)",
        _quietly(lambda q, k, v, lengths, module: module_of(module).run_recorded(q, k, v, lengths=lengths)),
        _fake_attention,
        (_attention_backward, _save_attention),
    ),
    (
        f"gather_attention_behind({_QKV}, Tensor earlier_k, Tensor earlier_v, int module) -> (Tensor, Tensor)",
        lambda *tensors_and_module: module_of(tensors_and_module[-1]).run_behind(*tensors_and_module[:-1]),
        _fake_attention,
        None,
    ),
    (
        f"gather_attention_gradients(Tensor d_o, {_QKV}, Tensor o, Tensor lse, int[]? lengths, int module) -> "
        "(Tensor, Tensor, Tensor)",
        lambda *tensors_and_module: module_of(tensors_and_module[-1]).gradients(*tensors_and_module[:-1]),
        lambda _, *tensors: tuple(tensor.new_empty(tensor.shape) for tensor in tensors[:3]),
        None,
    ),
    (
        "all_gather_rows(Tensor x, int module) -> Tensor",
        _quietly(_all_gather_rows),
        lambda x, module: x.new_empty(x.shape[0] * module_of(module).world_size, *x.shape[1:], dtype=module_of(module)._dtype),
        None,
    ),
    (
        "own_rows_of_sum(Tensor x, int module) -> Tensor",
        _quietly(_own_rows_of_sum),
        lambda x, module: x.new_empty(x.shape[0] // module_of(module).world_size, *x.shape[1:]),
        None,
    ),
    (
        "sum_over_ranks(Tensor x, int module) -> Tensor",
        _quietly(_sum_over_ranks),
        lambda x, module: torch.empty_like(x, memory_format=torch.contiguous_format),  # noqa: ARG005
        None,
    ),
)
"""Each operator: schema, implementation, fake implementation, and for recorded calls the backward and its saved tensors."""

for _operator in _OPERATORS:
    register(*_operator)
