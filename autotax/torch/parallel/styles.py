"""Torch's column- and row-parallel styles: with activations sharded along the sequence, a layer and its collective are one.

They apply torch's own styles, with torch's parameters and hooks, so optimizers, checkpoints and FSDP see the same DTensors. At
each call the hook before the forward decides whether the call is fused. Every other call stays that of torch's own style.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from autotax.torch.parallel.layers import ColumnLinear, FusedLinear, RowLinear, fuse, is_fused_result, is_plain_linear, ready


class _Fusing:
    """What both styles put before torch's own, which is the other base of each.

    Torch's styles name the methods and their arguments, and hand both hooks to `distribute_module`.
    """

    kind: type[FusedLinear]
    input_layouts: Any
    output_layouts: Any

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        output = self.output_layouts[0]
        served = isinstance(self.input_layouts[0], Shard) and isinstance(output, Shard) and device_mesh.ndim == 1
        served = served and device_mesh.get_coordinate() is not None and is_plain_linear(module, self.kind, device_mesh.size())
        module = super()._apply(module, device_mesh)  # type: ignore[misc]
        if served:
            fuse(module, self.kind, output, device_mesh)
        return module

    @classmethod
    def _prepare_input_fn(cls, input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        operands = ready(mod, inputs, input_layouts[0], device_mesh)
        return operands or super()._prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh)  # type: ignore[misc]

    @classmethod
    def _prepare_output_fn(cls, output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        if is_fused_result(mod, outputs):
            return outputs if use_local_output else DTensor.from_local(outputs, device_mesh, output_layouts, run_check=False)
        return super()._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)  # type: ignore[misc]


class ColwiseParallel(_Fusing, TorchColwise):
    """As torch's ColwiseParallel. Fused at each call whose input is sharded along another dimension than the last, and whose
    output along the last: the input is gathered while it is multiplied.

    The module is an nn.Linear that no one has patched, and the mesh divides its outputs and the rows of the call. A DTensor tells
    its rows; a plain input has as many on all ranks, as torch's style assumes too. All else is left to torch's own style.
    """

    kind = ColumnLinear


class RowwiseParallel(_Fusing, TorchRowwise):
    """As torch's RowwiseParallel. Fused at each call whose input is sharded along the last dimension, and whose output along
    another: the partial products are summed and scattered while others are multiplied.

    The module is an nn.Linear that no one has patched, and the mesh divides its inputs and the rows of the call. All else is left
    to torch's own style.
    """

    kind = RowLinear
