"""The two linear layers of tensor parallelism with sequence parallelism, and their gradients.

Each calls torch.ops.autotax.fused_*, also in its backward. These operators are opaque to compilers; they run a tuned kernel or
torch's operator. One collective is not fused: the column-parallel layer gathers its input again for the weight's gradient. That
costs less memory than to keep the gathered input of the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.nn.modules import module as modules

from autotax.core.errors import UsageError
from autotax.torch import symm_mem  # noqa: F401 - declares torch.ops.autotax.fused_*

NO_SECOND = (
    "a backward is itself recorded (create_graph=True), and fused layers have no second derivative: "
    "leave it out, or use torch's own parallel style"
)


def _require_last() -> None:
    """Raises UsageError for a second derivative."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError(NO_SECOND)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(-1, tensor.shape[-1])


def _gathered(x: Tensor, dim: int, ranks: int, group_name: str) -> Tensor:
    """The rows of all ranks. Waits in stream order: nothing may overlap with kernels that wait for peers."""
    collectives = torch.ops._c10d_functional
    rows: Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(_rows(x, dim).contiguous(), ranks, group_name))
    return rows


class ColumnParallel(torch.autograd.Function):
    """gather(x) @ weight.T + bias: x [..., K] is this rank's part of dimension `dim`, weight [n, K] and bias [n] this rank's.

    Returns [..., n], whole along `dim`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group_name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group_name = dim, group_name
        _, (y,) = torch.ops.autotax.fused_all_gather_matmul(x, [weight.t()], dim, group_name, return_A=False)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _require_last()
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.autotax.fused_matmul_reduce_scatter(grad, weight, "sum", ctx.dim, ctx.group_name)
        if ctx.needs_input_grad[1]:
            ranks = grad.shape[ctx.dim] // x.shape[ctx.dim]
            grad_weight = _rows(grad, ctx.dim).t() @ _gathered(x, ctx.dim, ranks, ctx.group_name)
        if ctx.needs_input_grad[2]:
            grad_bias = _rows(grad, ctx.dim).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


class RowParallel(torch.autograd.Function):
    """This rank's part, along `dim`, of the sum of x @ weight.T over the ranks, plus bias: x [..., k] and weight [N, k] are
    this rank's columns, bias [N] is the same on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group_name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group_name = dim, group_name
        y: Tensor = torch.ops.autotax.fused_matmul_reduce_scatter(x, weight.t(), "sum", dim, group_name)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _require_last()
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        whole = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        gathered, (grad_x,) = torch.ops.autotax.fused_all_gather_matmul(grad, [weight], ctx.dim, ctx.group_name, return_A=whole)
        if ctx.needs_input_grad[1]:
            grad_weight = _rows(gathered, ctx.dim).t() @ _rows(x, ctx.dim)
        if ctx.needs_input_grad[2]:  # the gradient is summed over all rows, because every rank has the same bias
            grad_bias = _rows(gathered, ctx.dim).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


# Linear layers with fused calls, and the checks of each call.

PLAIN = (Tensor, nn.Parameter, AsyncCollectiveTensor)
FORWARD = nn.Linear.forward
FORWARD_IS_TORCHS = FORWARD.__code__.co_filename == nn.Identity.forward.__code__.co_filename
"""False if a program replaced nn.Linear.forward before it imported this module."""


@dataclass
class Style:
    """The state of a style on a layer. Copies of the layer share it."""

    output: Placement
    pre_hook: int
    hook: int
    """The keys of the style's hooks among those of the layer."""
    ranks: int
    group_name: str
    proven: tuple[Any, Any] = (None, None)
    """The specs of weight and bias at the last check."""

    def __deepcopy__(self, _: Any) -> Style:
        return self


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


class ColumnLinear(FusedLinear):
    """Gathers its input along one dimension while it multiplies."""

    product, weight_dim, bias_placement = ColumnParallel, 0, Shard(0)


class RowLinear(FusedLinear):
    """Sums its output over the ranks, each of which keeps its part along one dimension."""

    product, weight_dim, bias_placement = RowParallel, 1, Replicate()


def is_plain_linear(module: nn.Module, kind: type[FusedLinear], ranks: int) -> bool:
    """Whether a module is a torch.nn.Linear (no subclass) with torch's forward, and `ranks` divides its weight."""
    if type(module) is not nn.Linear or "forward" in vars(module) or not _torchs_forward():
        return False
    return isinstance(module.weight, Tensor) and module.weight.dim() == 2 and module.weight.shape[kind.weight_dim] % ranks == 0


def fuse(module: nn.Module, kind: type[FusedLinear], output: Placement, mesh: DeviceMesh) -> None:
    """Turns a layer to which a style was just applied into a layer that fuses calls where possible."""
    pre_hook, hook = (next(reversed(hooks)) for hooks in (module._forward_pre_hooks, module._forward_hooks))
    module.__class__ = kind
    module._style = Style(output, pre_hook, hook, mesh.size(), mesh.get_group().group_name)  # type: ignore[assignment]


def is_fused_result(module: nn.Module, y: Any) -> bool:
    """Whether a forward was fused: it returns a local tensor, and torch's forward returns a DTensor."""
    return isinstance(module, FusedLinear) and not isinstance(y, DTensor) and "forward" not in module.__dict__


def ready(module: nn.Module, inputs: tuple[Any, ...], layout: Placement, mesh: DeviceMesh) -> tuple[Any, ...] | None:
    """The operands of the product, or None for a call that torch's style handles.

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
    (x,), style, gathers = inputs, module._style, module.weight_dim == 0
    shards = style.ranks
    if isinstance(x, DTensor):
        if x.device_mesh != mesh:
            return None
        layout, shards = x.placements[0], 1
    elif type(x) not in PLAIN or x.is_nested:
        return None
    # The placements along the sequence and along the last dimension.
    shape, (rows, columns) = x.shape, (layout, style.output) if gathers else (style.output, layout)
    if type(rows) is not Shard or type(columns) is not Shard:
        return None
    last = len(shape) - 1
    dim, column = (placement.dim if placement.dim >= 0 else placement.dim + last + 1 for placement in (rows, columns))
    # A plain x is one rank's part of the gathered rows; all parts have the same size.
    if not 0 <= dim < last or column != last or ((shards == 1 or not gathers) and shape[dim] % style.ranks):
        return None
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if not _proven(module, weight, bias, mesh) or shape[last] * (1 if gathers else shards) != weight.shape[1]:  # type: ignore[union-attr]
        return None
    operands = _of_one_type(_local(x), _local(weight), _local(bias), mesh.device_type)
    return None if operands is None else (*operands, dim, style.group_name)


def _torchs_forward() -> bool:
    """Whether no program has replaced the forward of torch.nn.Linear."""
    return FORWARD_IS_TORCHS and nn.Linear.forward is FORWARD and nn.functional.linear is torch._C._nn.linear


def _undisturbed(layer: FusedLinear) -> bool:
    """Whether nothing but this layer's forward runs between the two hooks of the style."""
    return (
        type(layer).forward is FusedLinear.forward
        and "forward" not in layer.__dict__
        and _torchs_forward()
        and next(reversed(layer._forward_pre_hooks)) == layer._style.pre_hook
        and next(iter(layer._forward_hooks)) == layer._style.hook
        and not layer._backward_hooks
        and not layer._backward_pre_hooks
        and not modules._global_forward_hooks
        and not modules._global_backward_hooks
        and not modules._global_backward_pre_hooks
    )


def _proven(layer: FusedLinear, weight: Tensor | None, bias: Tensor | None, mesh: DeviceMesh) -> bool:
    """Whether weight and bias are still the parameters that the style made; another tool may have replaced them."""
    if not isinstance(weight, DTensor) or not (bias is None or isinstance(bias, DTensor)):
        return False
    specs = weight._spec, None if bias is None else bias._spec
    proven = layer._style.proven
    if specs[0] is proven[0] and specs[1] is proven[1]:
        return True
    dim = layer.weight_dim
    right = weight.placements == (Shard(dim),) and weight.device_mesh == mesh
    right = right and weight.dim() == 2 and weight.shape[dim] % layer._style.ranks == 0
    if bias is not None:
        right = right and bias.placements == (layer.bias_placement,) and bias.device_mesh == mesh
        right = right and bias.shape == weight.shape[:1]
    if right and not is_compiling():
        layer._style.proven = specs
    return right


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor, recorded by autograd if needed."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if is_grad_enabled() else tensor._local_tensor


def _of_one_type(x: Tensor, weight: Tensor, bias: Tensor | None, device: str) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The operands in the type in which torch would compute, or None if kernels do not support them."""
    dtype, dtypes = x.dtype, (weight.dtype, x.dtype if bias is None else bias.dtype)
    autocast = torch.is_autocast_enabled(device)
    if autocast:
        # Autocast leaves float64 as it is, so torch handles it or reports the error.
        if any(item.itemsize not in (2, 4) for item in (dtype, *dtypes)):
            return None
    elif dtypes != (dtype, dtype):
        return None
    for item in (x, weight, bias):
        if item is not None and not (
            type(item) in PLAIN
            and item.layout is torch.strided
            and item.device.type == device
            and item.is_floating_point()
            and item.numel()
        ):
            return None
    if autocast:
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return x, weight, bias


# Torch's column- and row-parallel styles: with activations sharded along the sequence, a layer is fused with its collective.

class _Fusing:
    """The overrides that both styles share. The second base of each style is torch's own style.

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
    """Like torch's ColwiseParallel. Fuses each call whose input is sharded along another dimension than the last, and whose
    output along the last: the input is gathered while it is multiplied.

    The module is an nn.Linear that no one has patched, and the mesh divides its outputs and the rows of the call. A plain
    input has the same number of rows on all ranks, as torch's style also assumes. Torch's style handles every other call.
    """

    kind = ColumnLinear


class RowwiseParallel(_Fusing, TorchRowwise):
    """Like torch's RowwiseParallel. Fuses each call whose input is sharded along the last dimension, and whose output along
    another: the partial products are summed and scattered while others are multiplied.

    The module is an nn.Linear that no one has patched, and the mesh divides its inputs and the rows of the call. Torch's style
    handles every other call.
    """

    kind = RowLinear
