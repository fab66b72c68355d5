"""torch.ops.autotax.*: the modules as torch.compile sees them, one opaque operator a call.

A module is named by its handle, an integer; its weight is an argument, so that torch sees what is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotax.errors import UsageError
from autotax.nn.module import module_of, recorded

library = torch.library.Library("autotax", "FRAGMENT")
# Kernels take contiguous tensors: what a compiler passes on must be laid out as it was when traced.
TAGS = (torch.Tag.needs_fixed_stride_order,)


def _linear(x: Tensor, weight: Tensor, module: int) -> Tensor:
    result: Tensor = module_of(module).run(x, weight)
    return result


def _linear_out(x: Tensor, weight: Tensor, out: Tensor, module: int) -> None:
    module_of(module).run(x, weight, out)


def _linear_gathered(x: Tensor, weight: Tensor, module: int) -> tuple[Tensor, Tensor]:
    y, whole = module_of(module).run_gathered(x, weight)
    return y, whole


def _flash_decode(q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor, module: int, table: Tensor | None = None) -> Tensor:
    return module_of(module).run(q, k, v, kv_lens, table)


def _flash_decode_out(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor, out: Tensor, module: int, table: Tensor | None = None
) -> None:
    module_of(module).run(q, k, v, kv_lens, table, out)


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


def fake_linear(x: Tensor, weight: Tensor, module: int) -> Tensor:
    """The result of a layer, without values: of the weight's type, for under autocast x may have another."""
    layer = module_of(module)
    if torch.is_grad_enabled() and recorded(x, weight):
        raise UsageError(f"torch.ops has no backward for a compiled call; call the {type(layer).__name__} itself")
    return weight.new_empty(layer.shape_of(x.shape, layer.sides_of(weight)[1]))


def fake_gathered(x: Tensor, weight: Tensor, module: int) -> tuple[Tensor, Tensor]:
    """The product, and the gathered x."""
    whole = weight.new_empty(x.shape[0] * module_of(module).world_size, *x.shape[1:])
    return fake_linear(x, weight, module), whole


def _fake_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,  # noqa: ARG001
    kv_lens: Tensor,  # noqa: ARG001
    module: int,
    table: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    return k.new_empty(q.shape[0], module_of(module).out_heads, q.shape[2])


def _fake_merge(o: Tensor, lse: Tensor, module: int, *_: object) -> tuple[Tensor, Tensor]:
    made = module_of(module)
    shape = *o.shape[:-2], made.out_heads
    return o.new_empty(*shape, o.shape[-1], dtype=made._dtype), lse.new_empty(shape)


def _fake_nothing(*_: object, **__: object) -> None:
    """What writes into `out` returns nothing."""


for _schema, _run, _fake in (
    *(
        each
        for name in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce")
        for each in (
            (f"{name}(Tensor x, Tensor weight, int module) -> Tensor", _linear, fake_linear),
            (f"{name}_out(Tensor x, Tensor weight, Tensor(a!) out, int module) -> ()", _linear_out, _fake_nothing),
        )
    ),
    ("all_gather_linear_gathered(Tensor x, Tensor weight, int module) -> (Tensor, Tensor)", _linear_gathered, fake_gathered),
    (
        "flash_decode(Tensor q, Tensor k, Tensor v, Tensor kv_lens, int module, Tensor? table=None) -> Tensor",
        _flash_decode,
        _fake_decode,
    ),
    (
        "flash_decode_out(Tensor q, Tensor k, Tensor v, Tensor kv_lens, Tensor(a!) out, int module, Tensor? table=None) -> ()",
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
