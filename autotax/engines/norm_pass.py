"""A pass over graphs that vLLM has compiled: a row-parallel product of ours and the norm behind it become one operator.

vLLM's compiler fuses an all-reduce with a residual and a norm, but the all-reduce of our row-parallel operators is inside them.
`fuse` puts `autotax::fused_matmul_all_reduce_norm` in the place of both nodes, for shapes that have a winner which is one kernel
of all. Ranks have agreed on these when the layers were made (`rows.ranges_of_norms`).

The operator decides at each call, for its number of tokens. Its ways are those of eager models (`autotax.engines.norms`). They
are measured at the first call of each bucket of tokens, outside captures, and the ranks agree. A capture of tokens that
were not measured before takes the product with its sum, and the engine's norm.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from autotax.torch.scaled import ALL_REDUCE, CODES, product_by

Results = tuple[Tensor, ...]
"""y, the new residual, and with quant row the scales of y, float32 [tokens, 1]."""


@dataclass(frozen=True)
class Norm:
    """A norm of the engine, and how a graph holds it: as a call, or functionalised where its operator writes its arguments."""

    quant: str
    """none, tensor or row: how its result is quantised."""
    alone: Callable[[Tensor, Tensor, RmsNorm], Results]
    """The norm of a sum and its residual."""
    operands: tuple[str, ...]
    """The names of the sum, the residual, the weight and eps among the operator's arguments, and of the scale of quant tensor."""
    unused: tuple[str, ...]
    """Arguments that must be None."""
    places: tuple[int, ...]
    """Where y, the new residual and the scales are among the node's results."""


_norms: dict[Any, Norm] = {}
"""By operator."""
chosen: dict[tuple[Any, ...], str] = {}
"""The fastest way by shape and bucket of tokens."""


class Group(NamedTuple):
    """The fields of an engine's coordinator that `autotax.engines.norms` reads."""

    device_group: dist.ProcessGroup
    world_size: int


def use(engines: Mapping[Any, Norm]) -> None:
    """Sets the engine's norms, by operator, and forgets what was measured."""
    _norms.clear()
    _norms.update(engines)
    chosen.clear()


def run(
    a: Tensor, b: Tensor, scale: Tensor | None, scales: Tensor | None, quantize: str, residual: Tensor, weight: Tensor,
    eps: float, quant: str, y_scale: Tensor | None, group_name: str,
) -> list[Tensor]:  # fmt: skip
    """y and the new residual S: S is the sum over the ranks of a @ b, + residual; y is its RMSNorm. Then the scales that y has.

    Collective at the first call of a shape and bucket of tokens, except during a graph capture.

    Args:
        a: [tokens, k]. The inputs of this rank.
        b: [k, n]. The weight, of the type of a, or e4m3 in the engine's layout.
        scale: float32 [1]. The scale of inputs that are quantised statically.
        scales: float32. The scales of b in e4m3.
        quantize: row, block or static for b in e4m3. Else empty.
        residual: [tokens, n]. The same on all ranks.
        weight: [n]. The weight of the norm.
        eps: Added to the mean square.
        quant: none, tensor or row. How y is quantised.
        y_scale: float32, one element. The scale of y with quant tensor.
        group_name: The process group.
    """
    device_group = _group_of(group_name)
    y_scale = None if y_scale is None else y_scale.view(1)
    group, norm = Group(device_group, device_group.size()), RmsNorm(weight, eps, 0, quant, y_scale)

    def summed() -> Results:
        if scales is None:
            total = torch.ops.autotax.fused_matmul_all_reduce(a, b, group_name)
        else:
            total = torch.ops.autotax.fused_quantised_matmul(a, b, scale, scales, quantize, ALL_REDUCE, group_name)
        alone = next(engines.alone for engines in _norms.values() if engines.quant == quant)
        return alone(total, residual, norm)

    def left() -> Results | None:
        """A product of the library or of the engine, then our sum and norm."""
        product = a @ b if scales is None else product_by(b, a)
        if product is None:
            return None
        return norms.normed(product, residual, weight, group, eps, quant=quant, scale=y_scale)

    def whole() -> Results | None:
        return rows.in_one_kernel(a, b, scale, scales, quantize, residual, norm, group)

    ways: dict[str, Callable[[], Any]] = {SUMMED: summed, LEFT: left, WHOLE: whole}
    key = group_name, b.shape, a.dtype, quantize, quant, bucket(len(a))
    if key not in chosen and not capturing(a.device):
        possible = {way: call for way, call in ways.items() if way == SUMMED or call() is not None}
        name = f"product {b.shape[0]} x {b.shape[1]}"
        chosen[key] = norms.fastest(possible, World.of(device_group, a.device), a, name) if len(possible) > 1 else SUMMED
    results: Results | None = ways[chosen.get(key, SUMMED)]()
    y, total, *of_y = summed() if results is None else results
    return [y, total, *(made.view(-1, 1) for made in of_y)]


def _group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _meta(*operands: Any) -> list[Tensor]:
    residual, quant = operands[5], operands[8]
    y = residual.new_empty(residual.shape, dtype=residual.dtype if quant == "none" else CODES)
    made = [residual.new_empty((residual.shape[0], 1), dtype=torch.float32)] if quant == "row" else []
    return [y, residual.new_empty(residual.shape), *made]


def _declare() -> torch.library.Library:
    library = torch.library.Library("autotax", "FRAGMENT")
    library.define(
        f"{NORMED}(Tensor A, Tensor B, Tensor? A_scale, Tensor? B_scale, str quantize, Tensor residual, Tensor weight, "
        "float eps, str quant, Tensor? Y_scale, str group_name) -> Tensor[]",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    for key in KEYS:
        library.impl(NORMED, run, key)
    library.impl(NORMED, _meta, "Meta")
    return library


_own = _declare()


# The pass.


SIZE = torch.ops.aten.sym_size.int
LIKE = (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)


class Behind(NamedTuple):
    """The norm behind a sum: its kind, and its operands as `Norm.operands` names them."""

    norm: Norm
    operands: list[Any]


def fuse(graph: fx.Graph) -> int:
    """Fuses every pair of nodes that can be, and returns their number."""
    pairs = list(_pairs(graph))
    for product, node, (norm, (_, residual, weight, eps, *scale)), operands in pairs:
        a, b, of_a, of_b, quantize, group = operands
        fused = torch.ops.autotax.fused_matmul_all_reduce_norm.default
        arguments = a, b, of_a, of_b, quantize, residual, weight, eps, norm.quant, *(scale or [None]), group
        with graph.inserting_before(node):
            made = graph.call_function(fused, arguments)
            results = [graph.call_function(operator.getitem, (made, place)) for place in range(len(norm.places))]
        made.meta["val"] = fused(*fx.map_arg(arguments, _value))
        for result, value in zip(results, made.meta["val"], strict=True):
            result.meta["val"] = value
        for user in list(node.users):
            user.replace_all_uses_with(results[norm.places.index(user.args[1])])
            graph.erase_node(user)
        graph.erase_node(node)
        for other in list(product.users):
            if other.target is SIZE:  # the inputs have as many tokens, and the weight of the norm as many columns
                other.args = (weight if other.args[1] else a, 0)
            else:
                graph.erase_node(other)
        graph.erase_node(product)
    return len(pairs)


def _pairs(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, Behind, tuple[Any, ...]]]:
    """Sums that only a norm uses, with the node of that norm, the norm, and the operands of the product."""
    for product in graph.nodes:
        operands = _operands(product)
        users = [(user, behind) for user in product.users if operands and (behind := _behind(user, product))]
        if operands is None or not users:
            continue
        (node, behind), *_ = users
        if not all(user is node or _takes_shape(user, node) for user in product.users):
            continue
        norm, (_, residual, weight, _, *scale) = behind
        a, b, _, _, *how = operands
        values = [_value(node) for node in (a, b, residual, weight)]
        whole = all(isinstance(value, Tensor) and value.numel() == 1 for value in map(_value, scale))
        if whole and all(isinstance(value, Tensor) for value in values) and _fits(*values, *how, norm.quant):
            yield product, node, behind, operands


def _takes_shape(user: fx.Node, node: fx.Node) -> bool:
    """Whether a user of a sum takes only a size, or makes what only the norm at `node` writes."""
    return user.target is SIZE or (user.target in LIKE and list(user.users) == [node])


def _fits(a: Tensor, b: Tensor, residual: Tensor, weight: Tensor, *how: str) -> bool:
    """Whether one kernel may run these tensors. Weights have sizes that do not vary."""
    n, whole = weight.numel(), b.numel()
    plain = isinstance(n, int) and isinstance(whole, int) and a.dim() == residual.dim() == 2
    if not plain or not a.dtype == residual.dtype == weight.dtype:
        return False
    quantize, group_name, quant = how
    return rows.may_norm(n, whole // n, a.dtype, quantize, _group_of(group_name), a.device, quant)


def _behind(node: fx.Node, product: fx.Node) -> Behind | None:
    """The norm that a node computes of a product, if only its results are used; else None."""
    functional = node.target is torch.ops.higher_order.auto_functionalized
    target = node.args[0] if functional else node.target
    norm = _norms.get(target) if node.op == "call_function" else None
    if norm is None:
        return None
    names = [argument.name for argument in cast(Any, target)._schema.arguments]
    arguments = dict(node.kwargs) if functional else dict(zip(names, node.args, strict=False)) | node.kwargs
    operands = [arguments.get(name) for name in norm.operands]
    used = all(user.target is operator.getitem and user.args[1] in norm.places for user in node.users)
    unused = all(arguments.get(name) is None for name in norm.unused)
    if operands[0] is not product or product in operands[1:] or not used or not unused:
        return None
    return Behind(norm, operands)


def _operands(node: fx.Node) -> tuple[Any, ...] | None:
    """a, b, the two scales, `quantize` and the group of a node that sums products over all ranks; else None."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is torch.ops.autotax.fused_matmul_all_reduce.default and not any(node.args[3:]):
        a, b, group = node.args[:3]
        return a, b, None, None, "", group
    if node.target is torch.ops.autotax.fused_quantised_matmul.default:
        a, b, scale, scales, quantize, collective, group, *scale_ub = node.args
        return (a, b, scale, scales, quantize, group) if collective == ALL_REDUCE and not any(scale_ub) else None
    return None


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None
