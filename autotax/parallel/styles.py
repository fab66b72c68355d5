"""Torch's column- and row-parallel styles: with activations sharded along the sequence, a layer and its collective are one.

They shard parameters as torch's styles do, so optimizers, checkpoints and FSDP see the same DTensors. Every other layout, and
every module that is no torch.nn.Linear, is left to torch's own style.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from autotax.parallel.products import ColumnParallel, RowParallel

COLUMNS = (Shard(-1),)


class ColwiseParallel(TorchColwise):
    """As torch's ColwiseParallel. Fused for a linear layer with `input_layouts=Shard(d)`, d not the last dimension, whose output
    is sharded along the last one: the input is gathered while it is multiplied.

    Every rank holds as many rows along d, and the mesh divides the layer's outputs; else torch's own style serves.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = _sequence(self.input_layouts)
        served = isinstance(module, nn.Linear) and module.out_features % device_mesh.size() == 0
        if not served or dim is None or tuple(self.output_layouts) != COLUMNS or device_mesh.ndim != 1:
            return super()._apply(module, device_mesh)
        return _fused(module, device_mesh, ColumnForward, self, dim)


class RowwiseParallel(TorchRowwise):
    """As torch's RowwiseParallel. Fused for a linear layer with `output_layouts=Shard(d)`, d not the last dimension: the partial
    products are summed and scattered while others are multiplied.

    The mesh divides the layer's inputs, or else torch's own style serves. So it does a call whose rows it does not divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = _sequence(self.output_layouts)
        served = isinstance(module, nn.Linear) and module.in_features % device_mesh.size() == 0
        if not served or dim is None or tuple(self.input_layouts) != COLUMNS or device_mesh.ndim != 1:
            return super()._apply(module, device_mesh)
        return _fused(module, device_mesh, RowForward, self, dim)


class _Fused(nn.Module):
    """What the class of a fused layer begins with. Its other base is the class that the layer had."""

    weight: Tensor
    bias: Tensor | None
    _mesh: DeviceMesh
    _dim: int
    _use_local_output: bool

    def _taken(self, x: Tensor, layouts: tuple[Placement, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's part of an input, weight and bias, as autocast wants them."""
        if isinstance(x, DTensor):
            x = x.redistribute(placements=layouts).to_local() if x.placements != layouts else x.to_local()
        weight, bias = (each.to_local() if isinstance(each, DTensor) else each for each in (self.weight, self.bias))
        assert weight is not None
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
        return x, weight, bias

    def _given(self, y: Tensor, layouts: tuple[Placement, ...]) -> Tensor:
        return y if self._use_local_output else DTensor.from_local(y, self._mesh, layouts, run_check=False)


class ColumnForward(_Fused):
    """Gathers its input along one dimension while it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = self._taken(x, (Shard(self._dim),))
        return self._given(ColumnParallel.apply(x, weight, bias, self._dim, self._mesh.get_group().group_name), COLUMNS)


class RowForward(_Fused):
    """Sums its output over the ranks, each of which keeps its part along one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        layouts = (Shard(self._dim),)
        if x.shape[self._dim] % self._mesh.size():
            whole = x if isinstance(x, DTensor) else DTensor.from_local(x, self._mesh, COLUMNS, run_check=False)
            y: Any = super().forward(whole.redistribute(placements=COLUMNS)).redistribute(placements=layouts)
            return y.to_local() if self._use_local_output else y
        x, weight, bias = self._taken(x, COLUMNS)
        return self._given(RowParallel.apply(x, weight, bias, self._dim, self._mesh.get_group().group_name), layouts)


def _sequence(layouts: tuple[Placement, ...]) -> int | None:
    """The dimension of these layouts, if they shard another than the last."""
    dims = [each.dim for each in layouts if isinstance(each, Shard)]
    return dims[0] if len(dims) == len(layouts) == 1 and dims[0] >= 0 else None


def _fused(
    module: nn.Module, mesh: DeviceMesh, kind: type[_Fused], style: TorchColwise | TorchRowwise, dim: int
) -> nn.Module:
    """The same module with sharded parameters, of a class with a fused forward."""
    distribute_module(module, mesh, style._partition_linear_fn)
    module.__class__ = _class(cast(Any, kind), cast(Any, type(module)))
    module._mesh, module._dim, module._use_local_output = mesh, dim, style.use_local_output  # type: ignore[assignment]
    return module


@cache
def _class(kind: Any, base: Any) -> type[nn.Module]:
    return type(f"{kind.__name__.removesuffix('Forward')}{base.__name__}", (kind, base), {})
