"""Models made parallel by our styles against the same model whole: functions that run on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import autotax.torch
from autotax.heap.world import World
from autotax.torch.plans import Status
from autotax.torch.styles import ColwiseParallel, RowwiseParallel
from tests.torch.models import DIM, Block, Mlp

ROWS = 16
TOLERANCE = 1e-4


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def _whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _seeded(make: Any) -> nn.Module:
    torch.manual_seed(1)
    return make()


def _same_gradients(parallel: nn.Module, whole: nn.Module) -> None:
    names = dict(whole.named_parameters())
    assert names.keys() == dict(parallel.named_parameters()).keys()
    for name, parameter in parallel.named_parameters():
        theirs = names[name].grad
        ours = parameter.grad
        assert ours is not None, name
        if "norm" in name:  # replicated by hand: each rank has the part of its tokens
            ours = ours.clone()
            dist.all_reduce(ours)
        assert theirs is not None
        _close(_whole(ours), theirs)


def mlp(world: World, db: str, bias: bool, dtensors: bool, dim: int) -> tuple[Status, list[str]]:
    """Forward and backward of an MLP sharded along dimension `dim` of its input; the status, and the classes of its layers."""
    autotax.torch.install(db)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    whole = _seeded(lambda: Mlp(bias))
    ours = copy.deepcopy(whole)
    keep = {"use_local_output": not dtensors}
    plan = {"w1": ColwiseParallel(input_layouts=Shard(dim), **keep), "w2": RowwiseParallel(output_layouts=Shard(dim), **keep)}
    parallelize_module(ours, mesh, plan)
    full = torch.randn(*((4, ROWS) if dim else (ROWS,)), DIM, generator=torch.Generator().manual_seed(5))
    for turn in range(2):
        x = (full + turn).requires_grad_()
        expected = whole(x)
        (expected * expected).sum().backward()
        shard = (full + turn).chunk(world.size, dim)[world.rank].clone().requires_grad_()
        y = ours(DTensor.from_local(shard, mesh, [Shard(dim)]) if dtensors else shard)
        assert isinstance(y, DTensor) == dtensors
        if dtensors:
            assert y.placements == (Shard(dim),)
        local = y.to_local() if isinstance(y, DTensor) else y
        _close(local, expected.chunk(world.size, dim)[world.rank])
        (local * local).sum().backward()
        assert x.grad is not None
        assert shard.grad is not None
        _close(shard.grad, x.grad.chunk(world.size, dim)[world.rank])
    _same_gradients(ours, whole)
    for name, placement in (("w1.weight", Shard(0)), ("w2.weight", Shard(1))):
        assert dict(ours.named_parameters())[name].placements == (placement,)
    assert ours.state_dict().keys() == whole.state_dict().keys()
    status = autotax.torch.status()
    autotax.torch.uninstall()
    return status, [type(layer).__name__ for layer in (ours.w1, ours.w2)]


def block(world: World, compiled: bool) -> Status:
    """Forward and backward of a Llama block, eager or compiled, without any winner."""
    autotax.torch.install()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    whole = _seeded(Block)
    ours = copy.deepcopy(whole)
    columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(ours, mesh, dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), columns) | dict.fromkeys(("wo", "w2"), rows))
    full = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(5))
    expected = whole(full)
    expected.square().sum().backward()
    call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    y = call(full.chunk(world.size, 1)[world.rank])
    _close(y, expected.chunk(world.size, 1)[world.rank])
    y.square().sum().backward()
    _same_gradients(ours, whole)
    status = autotax.torch.status()
    autotax.torch.uninstall()
    return status


def left_to_torch(world: World) -> list[str]:
    """Layers that our styles leave to torch's; returns their classes, after a check of their results."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    classes = []
    for style, width in (
        (ColwiseParallel(), DIM),
        (ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()), DIM),
        (RowwiseParallel(), DIM),
        (ColwiseParallel(input_layouts=Shard(0)), DIM + 1),
    ):
        layer = _seeded(lambda width=width: nn.Linear(DIM, width))
        right = copy.deepcopy(layer)
        parallelize_module(layer, mesh, style)
        x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(5))
        shard = x.chunk(world.size, -1 if isinstance(style, RowwiseParallel) else 0)[world.rank]
        y = layer(x if style.input_layouts == (Replicate(),) else shard)
        expected = right(x)
        if isinstance(style, ColwiseParallel) and style.output_layouts != (Replicate(),):
            expected = expected.tensor_split([(width + 1) // world.size], -1)[world.rank]
        _close(y, expected)
        classes.append(type(layer).__name__)
    return classes


def rows_that_ranks_do_not_divide(world: World) -> None:
    """A row-parallel layer whose rows are scattered unevenly, as torch's style does it."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    layer = _seeded(lambda: nn.Linear(DIM, DIM))
    right = copy.deepcopy(layer)
    parallelize_module(layer, mesh, RowwiseParallel(output_layouts=Shard(0)))
    x = torch.randn(7, DIM, generator=torch.Generator().manual_seed(5))
    _close(layer(x.chunk(world.size, -1)[world.rank]), right(x).chunk(world.size)[world.rank])


def autocast(world: World) -> torch.dtype:
    """The dtype of a layer's result under autocast."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    layer = _seeded(lambda: nn.Linear(DIM, DIM))
    parallelize_module(layer, mesh, ColwiseParallel(input_layouts=Shard(0)))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(ROWS // world.size, DIM))
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32
    return y.dtype
