"""Unchanged models through parallelize_module, torch.compile and its micro-pipeline pass: functions that run on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autotax.torch
from autotax.heap.world import World
from autotax.torch.status import Status
from tests.torch.models import DIM, Block, TwoLayers

ROWS = 16
TOLERANCE = 1e-4
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


@contextmanager
def micro_pipeline() -> Iterator[list[int]]:
    """Enables Inductor's pass, which requires NCCL to be present. Yields the number of fused operators in all graphs so far."""
    emitted = [0]
    own = micro_pipeline_tp.micro_pipeline_tp_pass

    def counting(graph: torch.fx.Graph) -> None:
        own(graph)
        emitted[0] += sum(any(name in str(node.target) for name in FUSED) for node in graph.nodes)

    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(post_grad, "micro_pipeline_tp_pass", counting),
        inductor.patch({"_micro_pipeline_tp": True, "fx_graph_cache": False}),
        _test_mode(),
    ):
        yield emitted


def _passes_alone(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Runs Inductor's graph steps up to its micro-pipeline pass. No code is generated: C++ would take most of a test's time."""
    post_grad.view_to_reshape(graph)
    post_grad.micro_pipeline_tp_pass(graph.graph)
    graph.recompile()
    return make_boxed_func(graph.forward)


PASSES = aot_autograd(fw_compiler=_passes_alone, decompositions=select_decomp_table())


def _model(kind: str, mesh: Any) -> tuple[nn.Module, nn.Module, Tensor, int]:
    """A model, made parallel, and whole; an input, and the dimension along which it is sharded."""
    torch.manual_seed(1)
    dim = 1 if kind == "block" else 0
    columns, rows = ColwiseParallel(input_layouts=Shard(dim)), RowwiseParallel(output_layouts=Shard(dim))
    if kind == "block":
        whole: nn.Module = Block()
        plan = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), columns) | dict.fromkeys(("wo", "w2"), rows)
    else:
        whole = TwoLayers()
        plan = {f"{part}.w1": columns for part in ("first", "second")} | {f"{part}.w2": rows for part in ("first", "second")}
    full = torch.randn(*((2, ROWS) if dim else (ROWS,)), DIM)
    ours = copy.deepcopy(whole)
    parallelize_module(ours, mesh, plan)
    return ours, whole, full, dim


def trained(world: World, db: str, kind: str, backend: str) -> tuple[Status, int]:
    """One step of a compiled model, against the whole model; what was counted, and what the pass emitted."""
    autotax.torch.install(db)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    ours, whole, full, dim = _model(kind, mesh)
    x = full.clone().requires_grad_()
    expected = whole(x)
    expected.square().sum().backward()
    shard = full.chunk(world.size, dim)[world.rank].clone().requires_grad_()
    torch._dynamo.reset()
    with micro_pipeline() as emitted:
        compiled = torch.compile(ours, backend=PASSES if backend == "passes" else backend, fullgraph=True)
        y = compiled(shard)
        y.square().sum().backward()
    same(y, expected.chunk(world.size, dim)[world.rank])
    assert x.grad is not None
    same(shard.grad, x.grad.chunk(world.size, dim)[world.rank])
    for name, parameter in ours.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if "norm" in name:  # replicated by hand: each rank has the part of its tokens
            grad = grad.clone()
            dist.all_reduce(grad)
        same(grad.full_tensor() if isinstance(grad, DTensor) else grad, dict(whole.named_parameters())[name].grad)
    told = autotax.torch.status()
    autotax.torch.uninstall()
    return told, emitted[0]


def same(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
