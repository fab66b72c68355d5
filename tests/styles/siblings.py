"""A layer parallel by our style against the same layer parallel by torch's own: functions that run on all ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.tensor.parallel as torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrize

import autotax.torch.styles as ours
from autotax.heap.world import World
from autotax.torch import styles

K = 16


@dataclass(frozen=True)
class Case:
    """A layer, its style, and one call. `shape` is that of the whole input."""

    column: bool
    shape: tuple[int, ...]
    dim: int
    """The dimension that holds the sequence, which is sharded: in a column-parallel input or a row-parallel output."""
    other: Placement = field(default_factory=lambda: Shard(-1))
    """The layout at the other end."""
    bias: bool = True
    as_dtensor: bool = False
    placed: Placement | None = None
    """The placement of a DTensor input, if it differs from the style's."""
    local_output: bool = True
    frozen: tuple[str, ...] = ()
    change: str = ""
    """A user's change of the layer before or after the style is applied: a key of CHANGES."""
    twice: bool = False
    mode: str = "train"
    fused: bool = True


class Adapter(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _patch(layer: nn.Module) -> None:
    inner = layer.forward
    layer.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "patched before": _patch,
    "patched after": _patch,
    "pre-hook before": lambda layer: layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
    "pre-hook after": lambda layer: layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
    "hook before": lambda layer: layer.register_forward_hook(lambda _, __, y: y * 2),
    "hook after": lambda layer: layer.register_forward_hook(lambda _, __, y: y * 2),
    "backward hook": lambda layer: layer.register_full_backward_hook(lambda _, given, __: (given[0] * 2,)),
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "replicated after": lambda layer: setattr(
        layer,
        "weight",
        nn.Parameter(layer.weight.detach().redistribute(placements=[Replicate()])),
    ),
}


def _style(module: Any, case: Case) -> Any:
    sequence = Shard(case.dim)
    kind = module.ColwiseParallel if case.column else module.RowwiseParallel
    layouts = (sequence, case.other) if case.column else (case.other, sequence)
    return kind(input_layouts=layouts[0], output_layouts=layouts[1], use_local_output=case.local_output)


def _input(case: Case, style: Any, mesh: DeviceMesh) -> Tensor:
    whole = torch.randn(*case.shape, generator=torch.Generator().manual_seed(1))
    if case.as_dtensor:
        return distribute_tensor(whole, mesh, [case.placed or style.input_layouts[0]]).requires_grad_(case.mode == "train")
    part = distribute_tensor(whole, mesh, list(style.input_layouts)).to_local().clone()
    return part.requires_grad_(case.mode == "train")


def _seen(tensor: Tensor | None) -> Any:
    """A tensor as a user sees it: its kind, placement, global and local shape, type; and its values."""
    if tensor is None:
        return None, None
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        return ("DTensor", tensor.placements, tensor.shape, local.shape, tensor.dtype), local.detach().clone()
    return ("Tensor", tensor.shape, tensor.dtype), tensor.detach().clone()


def _outcome(module: Any, case: Case, mesh: DeviceMesh) -> tuple[list[Any], int]:
    """The results of one style for a case, and the number of its calls that were fused."""
    torch.manual_seed(0)
    layer: nn.Module = (Adapter if case.change == "subclass" else nn.Linear)(K, K, bias=case.bias)
    for name in case.frozen:
        layer.get_parameter(name).requires_grad_(False)
    change = CHANGES.get(case.change, lambda _: None)
    if "before" in case.change:
        change(layer)
    style = _style(module, case)
    parallelize_module(layer, mesh, style)
    if "before" not in case.change:
        change(layer)
    if case.change == "deepcopy":
        layer = copy.deepcopy(layer)
    x, kept = _input(case, style, mesh), []
    for kind in (styles.ColumnLinear, styles.RowLinear):
        kept.append((kind, kind.product))
        kind.product = _Counted(kind.product)
    products = [kind.product for kind, _ in kept]
    results = []
    try:
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(case.mode, nullcontext)():
            y = layer(x)
            if case.twice:
                y = y + layer(x)
        results.append(_seen(y))
        if case.mode == "train":
            y.square().sum().backward()
            results += [_seen(x.grad), *(_seen(parameter.grad) for parameter in layer.parameters())]
    finally:
        for kind, product in kept:
            kind.product = product
    return [*results, sorted(layer.state_dict())], sum(counter.calls for counter in products)


class _Counted:
    """A product that counts its calls."""

    def __init__(self, product: Any) -> None:
        self.product, self.calls = product, 0

    def apply(self, *operands: Any) -> Any:
        self.calls += 1
        return self.product.apply(*operands)


def same(world: World, case: Case) -> None:
    """Both styles give the same outputs, gradients, placements and types; ours is fused where the case says."""
    mesh = init_device_mesh("cpu", (world.size,))
    right, _ = _outcome(torchs, case, mesh)
    here, fused = _outcome(ours, case, mesh)
    assert fused == (2 if case.twice else 1) * case.fused, f"{fused} calls were fused"
    assert right[-1] == here[-1]
    for one, other in zip(right[:-1], here[:-1], strict=True):
        assert one[0] == other[0]
        torch.testing.assert_close(other[1], one[1], rtol=1e-4, atol=1e-4)


def uneven_chain(world: World) -> None:
    """7 rows as DTensors from a row-parallel layer to a column-parallel one, and back."""
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))
    parallel = copy.deepcopy(whole)
    first = ours.RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(parallel, mesh, {"0": first, "1": ours.ColwiseParallel(input_layouts=Shard(0))})
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(1))
    y, expected = parallel(x.chunk(world.size, 1)[world.rank]), whole(x)
    torch.testing.assert_close(y, expected.chunk(world.size, 1)[world.rank])
    y.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(parallel.parameters(), whole.parameters(), strict=True):
        assert isinstance(one.grad, DTensor)
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)


def refusals(world: World) -> list[tuple[str, str]]:
    """Errors of torch's style and ours for an input by keyword and for pickling; ours for a second derivative."""
    mesh, errors = init_device_mesh("cpu", (world.size,)), []
    case = Case(column=True, shape=(8, K), dim=0)
    for attempt in (lambda layer, x: layer(input=x), lambda layer, _: pickle.dumps(layer)):
        names = []
        for module in (torchs, ours):
            layer = nn.Linear(K, K)
            parallelize_module(layer, mesh, _style(module, case))
            try:
                attempt(layer, torch.randn(4, K))
                names.append("none")
            except Exception as error:
                names.append(type(error).__name__)
        errors.append((names[0], names[1]))
    layer = nn.Linear(K, K)
    parallelize_module(layer, mesh, _style(ours, case))
    x = torch.randn(4, K, requires_grad=True)
    try:
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    except Exception as error:
        errors.append((type(error).__name__, str(error)))
    return errors
