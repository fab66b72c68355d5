"""A pass over graphs that vLLM has compiled: a row-parallel product of ours and the norm behind it become one operator.

vLLM's compiler fuses an all-reduce with a residual and a norm, but the all-reduce of our row-parallel operators is inside them.
`fuse` puts `autotax::fused_matmul_all_reduce_norm` in the place of both nodes, for shapes that have a winner which is one kernel
of all. Ranks have agreed on these when the layers were made (`rows.ranges_of_norms`).

The operator decides at each call, for its number of tokens. Its ways are those of eager models (`autotax.engines.norms`). They
are measured at the first call of each bucket of tokens, outside captures, and the ranks agree. A capture of tokens that
were not measured before takes the product with its sum, and the engine's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autotax.db.index import bucket
from autotax.engines import norms, rows
from autotax.engines.norms import LEFT, SUMMED, WHOLE
from autotax.heap.world import World
from autotax.nn.groups import capturing
from autotax.torch.normed import NORMED, RmsNorm
from autotax.torch.registration import KEYS
from autotax.torch.scaled import ALL_REDUCE, product_by

Alone = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""The engine's norm of a sum, its residual, the weight and eps: y and the new residual."""
_alone: list[Alone] = []
chosen: dict[tuple[Any, ...], str] = {}
"""The fastest way by shape and bucket of tokens."""


class Group(NamedTuple):
    """The fields of an engine's coordinator that `autotax.engines.norms` reads."""

    device_group: dist.ProcessGroup
    world_size: int


def use(alone: Alone) -> None:
    """Sets the engine's norm, and forgets what was measured."""
    _alone[:] = [alone]
    chosen.clear()


def run(
    a: Tensor, b: Tensor, scale: Tensor | None, scales: Tensor | None, quantize: str, residual: Tensor, weight: Tensor,
    eps: float, group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the new residual S: S is the sum over the ranks of a @ b, + residual; y is its RMSNorm.

    Collective at the first call of a shape and bucket of tokens, except during a graph capture.

    Args:
        a: [tokens, k]. The inputs of this rank.
        b: [k, n]. The weight, of the type of a, or e4m3 in the engine's layout.
        scale: float32 [1]. The scale of inputs that are quantised statically.
        scales: float32. The scales of b in e4m3.
        quantize: row, block or static for b in e4m3. Else empty.
        residual: [tokens, n]. The same on all ranks.
        weight: [n]. The weight of the norm.
        eps: added to the mean square.
        group_name: The process group.
    """
    device_group = _group_of(group_name)
    group, norm = Group(device_group, device_group.size()), RmsNorm(weight, eps)

    def summed() -> tuple[Tensor, Tensor]:
        if scales is None:
            total = torch.ops.autotax.fused_matmul_all_reduce(a, b, group_name)
        else:
            total = torch.ops.autotax.fused_quantised_matmul(a, b, scale, scales, quantize, ALL_REDUCE, group_name)
        return _alone[0](total, residual, weight, eps)

    def left() -> tuple[Tensor, Tensor] | None:
        """A product of the library or of the engine, then our sum and norm."""
        product = a @ b if scales is None else product_by(b, a)
        if product is None:
            return None
        return cast(tuple[Tensor, Tensor] | None, norms.normed(product, residual, weight, group, eps))

    def whole() -> tuple[Tensor, Tensor] | None:
        return rows.in_one_kernel(a, b, scale, scales, quantize, residual, norm, group)

    ways: dict[str, Callable[[], Any]] = {SUMMED: summed, LEFT: left, WHOLE: whole}
    key = group_name, b.shape, a.dtype, quantize, bucket(len(a))
    if key not in chosen and not capturing(a.device):
        possible = {way: call for way, call in ways.items() if way == SUMMED or call() is not None}
        name = f"product {b.shape[0]} x {b.shape[1]}"
        chosen[key] = norms.fastest(possible, World.of(device_group, a.device), a, name) if len(possible) > 1 else SUMMED
    results: tuple[Tensor, Tensor] | None = ways[chosen.get(key, SUMMED)]()
    return summed() if results is None else results


def _group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _meta(*operands: Any) -> tuple[Tensor, Tensor]:
    residual = operands[5]
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _declare() -> torch.library.Library:
    library = torch.library.Library("autotax", "FRAGMENT")
    library.define(
        f"{NORMED}(Tensor A, Tensor B, Tensor? A_scale, Tensor? B_scale, str quantize, Tensor residual, Tensor weight, "
        "float eps, str group_name) -> (Tensor, Tensor)",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    for key in KEYS:
        library.impl(NORMED, run, key)
    library.impl(NORMED, _meta, "Meta")
    return library


_own = _declare()


# The pass.


def fuse(graph: fx.Graph, norm: Any) -> int:
    """Fuses every pair of nodes that can be, and returns their number.

    `norm` is the engine's operator of a sum, its residual, the weight and eps, and of further arguments that are None.
    """
    pairs = list(_pairs(graph, norm))
    for product, behind, operands in pairs:
        _, residual, weight, eps = behind.args[:4]
        a, b, scale, scales, quantize, group = operands
        with graph.inserting_before(behind):
            node = graph.call_function(
                torch.ops.autotax.fused_matmul_all_reduce_norm.default,
                (a, b, scale, scales, quantize, residual, weight, eps, group),
            )
        node.meta.update(behind.meta)
        behind.replace_all_uses_with(node)
        graph.erase_node(behind)
        graph.erase_node(product)
    return len(pairs)


def _pairs(graph: fx.Graph, norm: Any) -> Iterator[tuple[fx.Node, fx.Node, tuple[Any, ...]]]:
    """Sums that only a norm uses, with that norm and the operands of the product."""
    for product in graph.nodes:
        operands, users = _operands(product), list(product.users)
        if operands is None or len(users) != 1 or users[0].target is not norm:
            continue
        behind = users[0]
        takes_sum = behind.args[0] is product and product not in behind.args[1:]
        if not takes_sum or behind.kwargs or any(value is not None for value in behind.args[4:]):
            continue
        values = [_value(node) for node in (*operands[:2], *behind.args[1:3])]
        if all(isinstance(value, Tensor) for value in values) and _fits(*values, *operands[4:]):
            yield product, behind, operands


def _fits(a: Tensor, b: Tensor, residual: Tensor, weight: Tensor, quantize: str, group_name: str) -> bool:
    """Whether one kernel may run these tensors. Weights have sizes that do not vary."""
    n, whole = weight.numel(), b.numel()
    plain = isinstance(n, int) and isinstance(whole, int) and a.dim() == residual.dim() == 2
    if not plain or not a.dtype == residual.dtype == weight.dtype:
        return False
    return rows.may_norm(n, whole // n, a.dtype, quantize, _group_of(group_name), a.device)


def _operands(node: fx.Node) -> tuple[Any, ...] | None:
    """a, b, the two scales, `quantize` and the group of a node that sums products over all ranks; else None."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is torch.ops.autotax.fused_matmul_all_reduce.default and not any(node.args[3:]):
        a, b, group = node.args[:3]
        return a, b, None, None, "", group
    if node.target is torch.ops.autotax.fused_quantised_matmul.default:
        a, b, scale, scales, quantize, collective, group = node.args
        return (a, b, scale, scales, quantize, group) if collective == ALL_REDUCE else None
    return None


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None
