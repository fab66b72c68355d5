"""torch.ops.autotax.*: the modules as torch.compile sees them, one opaque operator a call.

A module is named by its handle, an integer; its weight is an argument, so that torch sees what is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.nn.base import module_of
from autotax.nn.tensor_checks import recorded

library = torch.library.Library("autotax", "FRAGMENT")
# Kernels take contiguous tensors: what a compiler passes on must be laid out as it was when traced.
TAGS = (torch.Tag.needs_fixed_stride_order,)
ADDENDS = ", Tensor? bias=None, Tensor? residual=None"
"""What row-parallel layers add to the sum where it is stored."""


def _linear(x: Tensor, weight: Tensor, module: int) -> Tensor:
    result: Tensor = module_of(module).run(x, weight)
    return result


def _linear_out(x: Tensor, weight: Tensor, out: Tensor, module: int) -> None:
    module_of(module).run(x, weight, out)


def _row_linear(x: Tensor, weight: Tensor, module: int, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    result: Tensor = module_of(module).run(x, weight, None, bias, residual)
    return result


def _row_linear_out(
    x: Tensor, weight: Tensor, out: Tensor, module: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    module_of(module).run(x, weight, out, bias, residual)


def _linear_gathered(x: Tensor, weight: Tensor, module: int) -> tuple[Tensor, Tensor]:
    y, whole = module_of(module).run_gathered(x, weight)
    return y, whole


def _flash_decode(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor, module: int, table: Tensor | None = None, *more: Tensor | None
) -> Tensor:
    """`more` are starts, scales and sinks."""
    return module_of(module).run(q, k, v, kv_lens, table, None, *more)


def _flash_decode_out(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor, out: Tensor, module: int, table: Tensor | None = None, *more: Tensor | None
) -> None:
    module_of(module).run(q, k, v, kv_lens, table, out, *more)


def _decode_merge(
    o: Tensor, lse: Tensor, module: int, seq_lens: Tensor | None = None, query_start_loc: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    merged: tuple[Tensor, Tensor] = module_of(module).run(o, lse, None, None, seq_lens, query_start_loc)
    return merged


def _decode_merge_out(
    o: Tensor,
    lse: Tensor,
    out: Tensor,
    merged_lse: Tensor,
    module: int,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> None:
    module_of(module).run(o, lse, out, merged_lse, seq_lens, query_start_loc)


def fake_linear(x: Tensor, weight: Tensor, module: int, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The result of a layer, without values: of the weight's type, for under autocast x may have another."""
    layer = module_of(module)
    if torch.is_grad_enabled() and recorded(x, weight, bias, residual):
        raise UsageError(f"torch.ops has no backward for a compiled call; call the {type(layer).__name__} itself")
    return weight.new_empty(layer.shape_of(x.shape, layer.sides_of(weight)[1]))


def fake_gathered(x: Tensor, weight: Tensor, module: int) -> tuple[Tensor, Tensor]:
    """The product, and the gathered x."""
    whole = weight.new_empty(x.shape[0] * module_of(module).world_size, *x.shape[1:])
    return fake_linear(x, weight, module), whole


def _fake_decode(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    kv_lens: Tensor,  # noqa: ARG001
    module: int,
    *_: object,
) -> Tensor:
    made = module_of(module)
    return q.new_empty(q.shape[0], made.out_heads, *q.shape[2:], dtype=made._dtype)


def _fake_merge(o: Tensor, lse: Tensor, module: int, *_: object) -> tuple[Tensor, Tensor]:
    made = module_of(module)
    shape = *o.shape[:-2], made.out_heads
    return o.new_empty(*shape, o.shape[-1], dtype=made._dtype), lse.new_empty(shape)


def _fake_nothing(*_: object, **__: object) -> None:
    """What writes into `out` returns nothing."""


_MORE = "Tensor? table=None, Tensor? starts=None, Tensor? scales=None, Tensor? sinks=None"
for _schema, _run, _fake in (
    *(
        each
        for name, run, run_out, more in (
            ("all_gather_linear", _linear, _linear_out, ""),
            ("linear_reduce_scatter", _row_linear, _row_linear_out, ADDENDS),
            ("linear_all_reduce", _row_linear, _row_linear_out, ADDENDS),
        )
        for each in (
            (f"{name}(Tensor x, Tensor weight, int module{more}) -> Tensor", run, fake_linear),
            (f"{name}_out(Tensor x, Tensor weight, Tensor(a!) out, int module{more}) -> ()", run_out, _fake_nothing),
        )
    ),
    ("all_gather_linear_gathered(Tensor x, Tensor weight, int module) -> (Tensor, Tensor)", _linear_gathered, fake_gathered),
    (
        f"flash_decode(Tensor q, Tensor k, Tensor v, Tensor kv_lens, int module, {_MORE}) -> Tensor",
        _flash_decode,
        _fake_decode,
    ),
    (
        f"flash_decode_out(Tensor q, Tensor k, Tensor v, Tensor kv_lens, Tensor(a!) out, int module, {_MORE}) -> ()",
        _flash_decode_out,
        _fake_nothing,
    ),
    (
        "decode_merge(Tensor o, Tensor lse, int module, Tensor? seq_lens=None, Tensor? query_start_loc=None) -> (Tensor, Tensor)",
        _decode_merge,
        _fake_merge,
    ),
    (
        "decode_merge_out(Tensor o, Tensor lse, Tensor(a!) out, Tensor(b!) merged_lse, int module, "
        "Tensor? seq_lens=None, Tensor? query_start_loc=None) -> ()",
        _decode_merge_out,
        _fake_nothing,
    ),
):
    _name = _schema.split("(")[0]
    library.define(_schema, tags=TAGS)
    library.impl(_name, _run, "CompositeExplicitAutograd")
    # A layer records what it calls itself.
    library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"autotax::{_name}", _fake, lib=library)
