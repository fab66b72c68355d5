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
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autotax.torch
from autotax.heap.collectives import all_gather
from autotax.heap.world import World
from autotax.torch.plans import Status
from autotax.torch.registration import OPERATORS
from tests.torch.models import DIM, Block, TwoLayers

ROWS = 16
TOLERANCE = 1e-4
FUSED = OPERATORS


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
    torch.compiler.reset()
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
    status = autotax.torch.status()
    autotax.torch.uninstall()
    return status, emitted[0]


# torchao's training in FP8: tensors in e4m3, gradients of results in e5m2, one scale each.

FP8_DIM, FP8_HIDDEN, FP8_ROWS, STEPS = 128, 256, 32, 2


@contextmanager
def float32_operators(world: World) -> Iterator[None]:
    """Torch's scaled operators as products in float32 of what their operands stand for."""

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return (a.float() * scale_a) @ (b.float() * scale_b)

    def gathering(A: Tensor, Bs: Any, A_scale: Tensor, B_scales: Any, *_: Any) -> Any:
        whole = A.new_empty(world.size * len(A), *A.shape[1:])
        all_gather(whole, A.contiguous(), world.data)
        return whole, [product(whole, b, A_scale, scale).bfloat16() for b, scale in zip(Bs, B_scales, strict=True)]

    def scattering(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, *more: Any) -> Tensor:
        total = product(A, B, A_scale, B_scale)
        dist.all_reduce(total)
        return total.view(more[4]).chunk(world.size)[world.rank].bfloat16()

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_scaled_matmul", gathering, "CPU")
    library.impl("fused_scaled_matmul_reduce_scatter", scattering, "CPU")
    try:
        yield
    finally:
        library._destroy()


def losses_of_torchao(world: World, backend: str) -> tuple[list[float], int]:
    """The losses of some steps of a model on torchao's styles, and the operators that the pass emitted."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FP8_DIM, FP8_HIDDEN, bias=False), nn.Linear(FP8_HIDDEN, FP8_DIM, bias=False)).bfloat16()
    convert_to_float8_training(model, config=Float8LinearConfig())
    styles = {"0": Float8ColwiseParallel(input_layouts=Shard(0)), "1": Float8RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",)), styles)
    x = torch.randn(FP8_ROWS, 1, FP8_DIM).bfloat16().chunk(world.size)[world.rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.compiler.reset()
    losses = []
    with micro_pipeline() as emitted:
        compiled = torch.compile(model, backend=PASSES if backend == "passes" else backend, fullgraph=True)
        for _ in range(STEPS):
            shard = x.clone().requires_grad_()
            loss = (compiled(shard).float() - x.float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, emitted[0]


def trained_in_fp8(world: World, db: str, backend: str) -> tuple[Status, int, list[float], list[float]]:
    """The counts, the operators that the pass emitted, our losses, and losses of products in float32."""
    with float32_operators(world):
        right, _ = losses_of_torchao(world, backend)
    autotax.torch.install(db)
    losses, emitted = losses_of_torchao(world, backend)
    status = autotax.torch.status()
    autotax.torch.uninstall()
    return status, emitted, losses, right


def two_layers_by_rows(world: World, db: str, backend: str) -> tuple[Status, int, list[Tensor]]:
    """Two layers whose inputs are quantised by row before they travel: the counts, the operators that the pass emitted, and the
    results of products in float32 and of ours. Both are compiled: an eager call would gather e4m3 by gloo, which cannot.
    """
    name = str(dist.group.WORLD.group_name)
    codes, scales = [], []
    for n, k, seed in ((FP8_HIDDEN, FP8_DIM, 1), (FP8_DIM, FP8_HIDDEN, 2)):
        own = torch.Generator().manual_seed(10 * seed + world.rank)
        codes.append(torch.randn(n, k, generator=own).to(torch.float8_e4m3fn))
        scales.append(torch.rand(1, n, generator=own) + 0.5)

    def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    def product(x: tuple[Tensor, Tensor], layer: int) -> Tensor:
        return torch._scaled_mm(x[0], codes[layer].t(), x[1], scales[layer], out_dtype=torch.bfloat16)

    def layers(x: Tensor) -> Tensor:
        a, b = (all_gather_tensor(part, 0, name) for part in quantised(x))
        return reduce_scatter_tensor(product(quantised(product((a, b), 0)), 1), "sum", 0, name)

    def run() -> tuple[Tensor, int]:
        torch.compiler.reset()
        with torch.no_grad(), micro_pipeline() as emitted:
            compiled = torch.compile(layers, backend=PASSES if backend == "passes" else backend, fullgraph=True)
            return compiled(x), emitted[0]

    x = torch.randn(FP8_ROWS // world.size, FP8_DIM, generator=torch.Generator().manual_seed(world.rank)).bfloat16()
    with float32_operators(world):
        right, _ = run()
    autotax.torch.install(db)
    ours, emitted = run()
    status = autotax.torch.status()
    autotax.torch.uninstall()
    return status, emitted, [right, ours]


def same(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
