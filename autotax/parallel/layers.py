"""LINEAR LAYERS that are fused at the calls that can be, and whether a call can be.

The answer must be the same on all ranks, and no rank may ask another. So it follows from what ranks share: the module, its hooks,
types, and the global shape of a DTensor. Of a plain tensor torch's styles assume that all ranks hold as much, and so does this.
A call that is not fused goes on as torch's own style has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules import module as modules

from autotax.parallel.products import ColumnParallel, RowParallel

PLAIN = (Tensor, nn.Parameter, AsyncCollectiveTensor)
FORWARD = nn.Linear.forward
FORWARD_IS_TORCHS = FORWARD.__code__.co_filename == nn.Identity.forward.__code__.co_filename
"""False where a program replaced nn.Linear.forward before it imported this module."""


@dataclass(frozen=True)
class Style:
    """What a layer keeps of its style."""

    output: Placement
    pre_hook: int
    hook: int
    """The keys of the two hooks among those of the layer."""


class FusedLinear(nn.Linear):
    """An nn.Linear whose forward is one product with its collective, if the hook before it has made the operands ready."""

    product: ClassVar[Any]
    weight_dim: ClassVar[int]
    """The sharded dimension of the weight."""
    bias_placement: ClassVar[Placement]
    _style: Style

    def forward(self, input: Tensor, *ready: Any) -> Tensor:
        y: Tensor = self.product.apply(input, *ready) if ready else super().forward(input)
        return y

    @staticmethod
    def rows_and_columns(x: Placement, y: Placement) -> tuple[Placement, Placement]:
        """Of the placements of input and output the one along the sequence, and the one along the last dimension."""
        raise NotImplementedError


class ColumnLinear(FusedLinear):
    """Gathers its input along one dimension while it multiplies."""

    product, weight_dim, bias_placement = ColumnParallel, 0, Shard(0)

    @staticmethod
    def rows_and_columns(x: Placement, y: Placement) -> tuple[Placement, Placement]:
        """See FusedLinear.rows_and_columns."""
        return x, y


class RowLinear(FusedLinear):
    """Sums its output over the ranks, each of which keeps its part along one dimension."""

    product, weight_dim, bias_placement = RowParallel, 1, Replicate()

    @staticmethod
    def rows_and_columns(x: Placement, y: Placement) -> tuple[Placement, Placement]:
        """See FusedLinear.rows_and_columns."""
        return y, x


def is_plain_linear(module: nn.Module, kind: type[FusedLinear], ranks: int) -> bool:
    """Whether a module is torch.nn.Linear, no subclass, with torch's forward, and as many ranks divide its weight."""
    if type(module) is not nn.Linear or "forward" in vars(module) or not _torchs_forward():
        return False
    return isinstance(module.weight, Tensor) and module.weight.dim() == 2 and module.weight.shape[kind.weight_dim] % ranks == 0


def fuse(module: nn.Module, kind: type[FusedLinear], output: Placement) -> None:
    """Makes a layer whose last hook of each kind is its style's one that is fused where it can be."""
    hooks = [next(reversed(each)) for each in (module._forward_pre_hooks, module._forward_hooks)]
    module.__class__ = kind
    module._style = Style(output, *hooks)  # type: ignore[assignment]


def is_fused_result(module: nn.Module, y: Any) -> bool:
    """Whether a forward gave the local result of its product: torch's own gives a DTensor."""
    return isinstance(module, FusedLinear) and not isinstance(y, DTensor) and "forward" not in module.__dict__


def ready(module: nn.Module, inputs: tuple[Any, ...], layout: Placement, mesh: DeviceMesh) -> tuple[Any, ...] | None:
    """The operands of the product, or None for a call that is left to torch's own style.

    Args:
        module: any module to which a style was applied.
        inputs: the positional arguments of the call.
        layout: how the style says that a plain input is placed.
        mesh: one-dimensional.

    Returns:
        x, weight and bias (or None) of this rank, of one type; the dimension that is gathered or scattered; the group's name.
    """
    if not isinstance(module, FusedLinear) or len(inputs) != 1 or not _undisturbed(module):
        return None
    (x,) = inputs
    if isinstance(x, DTensor):
        if len(x.placements) != 1 or x.device_mesh != mesh:
            return None
        layout, shards = x.placements[0], 1
    else:
        shards = mesh.size()
    if not isinstance(x, Tensor) or x.is_nested:
        return None
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    rows, columns = module.rows_and_columns(layout, module._style.output)
    dim, last = _dim(rows, x), _dim(columns, x)
    if dim is None or last != x.dim() - 1 or dim >= last or not _sharded(weight, Shard(module.weight_dim), mesh):
        return None
    if bias is not None and not _sharded(bias, module.bias_placement, mesh):
        return None
    assert weight is not None
    # Rows of a plain input that is gathered are as many on all ranks: of these, the shape here is no one's whole shape.
    gathers = module.weight_dim == 0
    if (shards == 1 or not gathers) and x.shape[dim] % mesh.size():
        return None
    if weight.shape[module.weight_dim] % mesh.size() or x.shape[-1] * (1 if gathers else shards) != weight.shape[1]:
        return None
    operands = _of_one_type([_local(x), _local(weight), None if bias is None else _local(bias)], mesh.device_type)
    return None if operands is None else (*operands, dim, mesh.get_group().group_name)


def _torchs_forward() -> bool:
    """Whether torch.nn.Linear computes what torch lets it compute."""
    return FORWARD_IS_TORCHS and nn.Linear.forward is FORWARD and nn.functional.linear is torch._C._nn.linear


def _undisturbed(layer: FusedLinear) -> bool:
    """Whether all that runs between the two hooks of the style is this layer's own forward."""
    return (
        type(layer).forward is FusedLinear.forward
        and "forward" not in layer.__dict__
        and _torchs_forward()
        and [*layer._forward_pre_hooks][-1] == layer._style.pre_hook
        and next(iter(layer._forward_hooks)) == layer._style.hook
        and not layer._backward_hooks
        and not layer._backward_pre_hooks
        and not modules._global_forward_hooks
        and not modules._global_backward_hooks
        and not modules._global_backward_pre_hooks
    )


def _dim(placement: Placement, x: Tensor) -> int | None:
    """The dimension along which x is sharded, from 0, or None."""
    if type(placement) is not Shard or not -x.dim() <= placement.dim < x.dim():
        return None
    return placement.dim % x.dim()


def _sharded(parameter: Tensor | None, placement: Placement, mesh: DeviceMesh) -> bool:
    """Whether a parameter is what the style made of it, and not what another tool put in its place."""
    return isinstance(parameter, DTensor) and parameter.placements == (placement,) and parameter.device_mesh == mesh


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _of_one_type(operands: list[Tensor | None], device: str) -> list[Tensor | None] | None:
    """x, weight and bias in the type in which torch would compute, or None for what kernels do not take."""
    tensors = [each for each in operands if each is not None]
    if any(type(each) not in PLAIN or each.layout is not torch.strided or each.device.type != device for each in tensors):
        return None
    dtypes = {each.dtype for each in tensors}
    if not all(dtype.is_floating_point for dtype in dtypes) or not all(each.numel() for each in tensors):
        return None
    if not torch.is_autocast_enabled(device):
        return operands if len(dtypes) == 1 else None
    if any(dtype.itemsize not in (2, 4) for dtype in dtypes):
        return None  # autocast leaves float64 as it is
    dtype = torch.get_autocast_dtype(device)
    return [each if each is None else each.to(dtype) for each in operands]
