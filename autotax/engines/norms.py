"""All-reduce, residual and norm for serving engines: which calls a winner serves, and the modules that run them.

Engines pass a coordinator of their groups: anything with `device_group` and `world_size`. `normed` looks winners up at the first
call of a shape, for all numbers of tokens, and compares them over the ranks. It makes one module for each group, shape and
quantisation. At the first call of a bucket of tokens it measures the engine's function against ours. All this is collective,
and nothing of it happens during a graph capture: a call before it, or without a tuned kernel, is the engine's own.

Eager models leave the sum of a row-parallel layer to the norm behind it (`reduce_results=False`). There are three ways:

- the product, then sum and norm by the engine's fused function (ours where it is taken);
- product and sum by a winner of GEMM + All-Reduce, then the engine's norm alone;
- product, sum and norm by a winner that is one kernel.

All are measured when a layer's result first reaches the fused function, for each bucket of tokens, and the ranks agree on
the fastest. If that is not the first, later calls of the layer return a `Pending`: a tensor that is computed when it is used.
The fused function takes it uncomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autotax.db.index import bucket
from autotax.engines import rows
from autotax.engines.thresholds import Ranges, norm_ranges, tuned
from autotax.engines.timing import least_microseconds
from autotax.heap.world import World
from autotax.nn.consensus import DTYPES
from autotax.nn.groups import capturing
from autotax.nn.norm import AllReduceNorm
from autotax.torch.normed import RmsNorm
from autotax.torch.plans import CAPTURED, TORCH, count_of

log = logging.getLogger("autotax")
MOST_TOKENS = 8192
"""The most tokens of the operator."""
Key = tuple[Any, ...]
"""The hidden size, dtype, device, quantisation, offset and eps."""
_norms: WeakKeyDictionary[dist.ProcessGroup, dict[Key, AllReduceNorm]] = WeakKeyDictionary()
_faster: WeakKeyDictionary[AllReduceNorm, dict[Key, str]] = WeakKeyDictionary()
"""By the module: the faster one of OURS and THEIRS, by the engine's function, the results that calls bring, and the bucket."""
OURS, THEIRS = "runs the tuned kernel", "runs the engine's function"


class Fused(NamedTuple):
    """A function of the engine that sums, adds and norms: its name, and a call of it for rows, a residual and results."""

    name: str
    run: Callable[..., Any]


def normed(
    x: Tensor, residual: Tensor, weight: Tensor, group: Any, eps: float, *, offset: int = 0, quant: str = "none",
    scale: Tensor | None = None, fused: Fused | None = None, **results: Tensor | None,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """y and the new residual where a tuned kernel sums, adds and norms faster than the engine; else None.

    Collective at the first call of a shape, and of a bucket of tokens. During graph capture it is not collective, and the answer
    for a new one is None. The ranks agree on each answer. Counts the call.

    `x` [tokens, hidden] are this rank's partial sums, `weight` is [hidden], and `group` is the engine's coordinator. `offset` is
    added to the weight. A y in e4m3 has the `scale`, float32 [1], or with quant row scales that follow the results. `fused` is
    measured against ours at the first call of a bucket; without it ours runs. `results` are the `out` and `residual_out` of
    AllReduceNorm. These may be x and the residual: where the kernel of this size cannot work in place, the results are copied.
    """
    alike = x.dim() == 2 and x.shape == residual.shape and x.dtype == weight.dtype == residual.dtype
    if group.world_size == 1 or not alike or x.dtype not in DTYPES or x.shape[1] % 8 or x.shape[1] > 16384:
        return None
    (tokens, hidden), quant = x.shape, quant if scale is None else "tensor"

    def ranges(world: World) -> Ranges:
        return norm_ranges(hidden, DTYPES[x.dtype], group.world_size, quant=quant, offset=offset, world=world)

    key = hidden, x.dtype, x.device, quant, offset, eps
    make = partial(prepare, group, hidden, x.dtype, x.device, eps, quant=quant, offset=offset)
    of_key, name = _norms.setdefault(group.device_group, {}).get(key), f"norms of {hidden} columns"
    norm, reason = tuned(of_key, tokens, group.device_group, x.device, ("norm", *key), name, ranges, make)
    brought = {name: tensor for name, tensor in results.items() if tensor is not None}
    if norm and fused:
        reason = _slower(norm, fused, group, x, residual, weight, scale, brought)
    taken = norm is not None and not reason
    count_of("all-reduce norm", f"({hidden} columns)", "autotax" if taken else TORCH, reason).calls += 1
    return _run(norm, x, residual, weight, scale, brought) if norm and taken else None


def _slower(
    norm: AllReduceNorm, fused: Fused, group: Any, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None,
    brought: dict[str, Tensor],
) -> str:  # fmt: skip
    """Why the engine's function is taken; empty if ours is faster. Collective at the first call of a bucket."""
    faster, key = _faster.setdefault(norm, {}), (fused.name, *brought, bucket(len(x)))
    if key not in faster:
        if capturing(x.device):
            return CAPTURED
        copies = {tensor.data_ptr(): tensor.clone() for tensor in (x, residual, *brought.values())}
        rows, added = copies[x.data_ptr()], copies[residual.data_ptr()]
        into = {name: copies[tensor.data_ptr()] for name, tensor in brought.items()}
        ways: dict[str, Callable[[], Any]] = {
            THEIRS: lambda: fused.run(rows, added, **into), OURS: lambda: _run(norm, rows, added, weight, scale, into),
        }  # fmt: skip
        faster[key] = fastest(ways, World.of(group.device_group, x.device), x, f"{fused.name} of {x.shape[1]} columns")
    return "" if faster[key] == OURS else "the engine's own function was faster for this number of tokens"


def _run(
    norm: AllReduceNorm, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None, brought: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    apart = not {tensor.data_ptr() for tensor in brought.values()} & {x.data_ptr(), residual.data_ptr()}
    if apart or norm.works_in_place(len(x)):
        return norm.run(x, weight, residual, scale, **brought, in_place=True)
    outputs = dict(zip(("out", "residual_out"), norm.run(x, weight, residual, scale), strict=False))
    return tuple(brought[name].copy_(made) if name in brought else made for name, made in outputs.items())


def prepare(
    group: Any, hidden: int, dtype: torch.dtype, device: Any, eps: float, *, quant: str = "none", offset: int = 0
) -> AllReduceNorm:
    """Makes the module for later calls of this shape, before a capture. Collective over the group."""
    options = {"eps": eps, "offset": offset, "quant": quant, "device": device}
    norm = AllReduceNorm(hidden, MOST_TOKENS, group.device_group, dtype, **options)
    _norms.setdefault(group.device_group, {})[hidden, dtype, norm._device, quant, offset, eps] = norm
    return norm


def forget(group: Any) -> None:
    """Closes all modules of a group. Collective; graphs that were captured before must not be replayed afterwards."""
    for norm in _norms.pop(group.device_group, {}).values():
        norm.close()


# Layers whose sum is left to the norm.

Product = Callable[[Tensor], Tensor]
Source = tuple[Any, rows.Row, Tensor, Product]
Norm = Callable[[Tensor, Tensor], Any]
"""Takes rows and a residual; it may overwrite both."""
SOURCE, WAYS = "_autotax_source", "_autotax_ways"
"""Attributes of a layer's result: the layer and its input; and of a layer: the fastest way by tokens."""
LEFT, SUMMED, WHOLE = "leaves its sum to the norm", "sums with its product", "sums and norms with its product"
"""The three ways, as logs name them."""


class Pending(Tensor):
    """The product of a layer, not yet computed. Any operation of torch computes it and goes on with the plain tensor."""

    layer: Any
    input: Tensor
    product: Product
    computed: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(layer: Any, x: Tensor, product: Product, columns: int) -> Pending:
        shape = (*x.shape[:-1], columns)
        made: Pending = Tensor._make_wrapper_subclass(Pending, shape, dtype=x.dtype, device=x.device)
        made.layer, made.input, made.product, made.computed = layer, x, product, None
        return made

    def value(self) -> Tensor:
        if self.computed is None:
            self.computed = self.product(self.input)
        return self.computed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def unsummed(layer: Any, row: rows.Row | None, x: Any, product: Product) -> Tensor:
    """The result of a layer without a sum: its product, or a Pending. `product` is the engine's."""
    if row is None or torch.compiler.is_compiling() or not isinstance(x, Tensor) or x.dim() != 2:
        return product(x)
    way = vars(layer).get(WAYS, {}).get(bucket(len(x)))
    if way in (SUMMED, WHOLE):
        return Pending.of(layer, x, product, layer.output_size)
    y = product(x)
    if way is None:
        setattr(y, SOURCE, (layer, row, x, product))
    return y


def summed_and_normed(
    hidden: Tensor, residual: Tensor, group: Any, fused: Norm, alone: Norm, norm: RmsNorm | None
) -> Any:
    """The results of the engine's function `fused`, which sums, adds and norms; or of its norm `alone` behind our sum; or of one
    kernel that also norms.

    `hidden` [tokens, hidden] are the partial sums of this rank, `group` is the engine's coordinator. `norm` is None where kernels
    do not compute this norm.
    """
    if isinstance(hidden, Pending):
        row = hidden.layer._autotax_row
        if hidden.computed is not None or row is None:
            return fused(hidden.value(), residual)
        way = vars(hidden.layer)[WAYS][bucket(len(hidden))]
        if way == WHOLE and norm and (results := rows.normed(row, hidden.layer, hidden.input, residual, norm, group)):
            return results
        return alone(rows.run(row, hidden.layer, hidden.input), residual)
    source: Source | None = vars(hidden).pop(SOURCE, None)
    if source is not None and not capturing(hidden.device):
        _decide(source, residual, group, fused, alone, norm)
    return fused(hidden, residual)


def _decide(source: Source, residual: Tensor, group: Any, fused: Norm, alone: Norm, norm: RmsNorm | None) -> None:
    """Measures the ways that there are for this number of tokens. Collective."""
    layer, row, x, product = source
    world = World.of(group.device_group, x.device)

    ways: dict[str, Callable[[], Any]] = {
        LEFT: lambda: fused(product(x), residual.clone()), SUMMED: lambda: alone(rows.run(row, layer, x), residual.clone()),
    }  # fmt: skip
    if norm and rows.normed(row, layer, x, residual, norm, group):
        ways[WHOLE] = lambda: rows.normed(row, layer, x, residual, norm, group)
    name = cast(str, getattr(layer, "prefix", "")) or type(layer).__name__
    layer.__dict__.setdefault(WAYS, {})[bucket(len(x))] = fastest(ways, world, x, name)


def fastest(ways: dict[str, Callable[[], Any]], world: World, x: Tensor, name: str) -> str:
    """Measures the ways of a layer of this name, for the tokens of `x`. Collective."""
    us = [least_microseconds(world, x.device, way) for way in ways.values()]
    slowest = [max(of_ranks) for of_ranks in zip(*world.gather(us, list[float]), strict=True)]
    way, first = list(ways)[slowest.index(min(slowest))], next(iter(ways))
    log.info("autotax: %s %s for %d tokens: %.1f us, %.1f if it %s", name, way, len(x), min(slowest), slowest[0], first)
    return way
