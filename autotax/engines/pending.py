"""Row-parallel layers whose sum is left to the norm behind them (`reduce_results=False`), in eager models of serving engines.

There are two ways: the product, then sum and norm by the engine's fused function (ours where it is taken); or product and sum by
a winner of GEMM + All-Reduce, then the engine's norm alone. Both are measured when a layer's result first reaches the fused
function, for each power of two of tokens, and the ranks agree on the faster. If the second is, later calls of the layer return a
`Pending`: a tensor that is computed when it is used. The fused function takes it uncomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autotax.core.problem import power_of_two
from autotax.engines import rows
from autotax.heap.world import World
from autotax.nn.groups import capturing
from autotax.nn.linear import least_microseconds

log = logging.getLogger("autotax")
Product = Callable[[Tensor], Tensor]
Source = tuple[Any, rows.Row, Tensor, Product]
Norm = Callable[[Tensor, Tensor], Any]
"""Takes rows and a residual; it may overwrite both."""
SOURCE, WAYS = "_autotax_source", "_autotax_summed_first"
"""Attributes of a layer's result: the layer and its input; and of a layer: by tokens, whether the second way is the faster."""


class Pending(Tensor):
    """The product of a layer, not yet computed. Any operation of torch computes it and goes on with the plain tensor."""

    layer: Any
    input: Tensor
    product: Product
    computed: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(layer: Any, x: Tensor, product: Product, columns: int) -> Pending:
        """The result of `product(x)`, of as many columns."""
        shape = (*x.shape[:-1], columns)
        made: Pending = Tensor._make_wrapper_subclass(Pending, shape, dtype=x.dtype, device=x.device)
        made.layer, made.input, made.product, made.computed = layer, x, product, None
        return made

    def value(self) -> Tensor:
        """The product, computed once."""
        if self.computed is None:
            self.computed = self.product(self.input)
        return self.computed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def result(layer: Any, row: rows.Row | None, x: Any, product: Product) -> Tensor:
    """The result of a layer without a sum: its product, or a Pending. `product` is the engine's."""
    if row is None or torch.compiler.is_compiling() or not isinstance(x, Tensor) or x.dim() != 2:
        return product(x)
    summed_first = vars(layer).get(WAYS, {}).get(power_of_two(len(x)))
    if summed_first:
        return Pending.of(layer, x, product, layer.output_size)
    y = product(x)
    if summed_first is None:
        setattr(y, SOURCE, (layer, row, x, product))
    return y


def normed(hidden: Tensor, residual: Tensor, group: Any, fused: Norm, alone: Norm) -> Any:
    """The results of the engine's fused function `fused`, or of its norm `alone` behind our sum.

    Args:
        hidden: [tokens, hidden], the partial sums of this rank.
        residual: [tokens, hidden].
        group: The engine's coordinator.
        fused: Sums, adds and norms.
        alone: Adds and norms.
    """
    if isinstance(hidden, Pending):
        row = hidden.layer._autotax_row
        if hidden.computed is None and row is not None:
            return alone(rows.run(row, hidden.layer, hidden.input), residual)
        return fused(hidden.value(), residual)
    source: Source | None = vars(hidden).pop(SOURCE, None)
    if source is not None and not capturing(hidden.device):
        _decide(source, residual, group, fused, alone)
    return fused(hidden, residual)


def _decide(source: Source, residual: Tensor, group: Any, fused: Norm, alone: Norm) -> None:
    """Measures both ways for this number of tokens. Collective."""
    layer, row, x, product = source
    world = World.of(group.device_group, x.device)
    summed_first = layer.__dict__.setdefault(WAYS, {})

    def apart() -> Any:
        return fused(product(x), residual.clone())

    def together() -> Any:
        return alone(rows.run(row, layer, x), residual.clone())

    us = [least_microseconds(world, x.device, way) for way in (apart, together)]
    slowest = [max(of_ranks) for of_ranks in zip(*world.gather(us, list[float]), strict=True)]
    chosen = summed_first[power_of_two(len(x))] = slowest[1] < slowest[0]
    first = "sums with its product" if chosen else "leaves its sum to the norm"
    name = cast(str, getattr(layer, "prefix", "")) or type(layer).__name__
    log.info("autotax: %s %s for %d tokens (%.1f against %.1f us)", name, first, len(x), min(slowest), max(slowest))
