"""Torch's `context_parallel` on GPUs with its attention on a tuned kernel: outputs and gradients are those of dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autotax.torch
from autotax.core.conditions import Conditions
from autotax.db import Store
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.operators.problems import GatherAttention
from autotax.runner.ranks import Ranks
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner

HEADS, TOKENS, DIM = SHAPE = 8, 2048, 128
BACKENDS = {
    "cudnn": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
    "flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, detect().backend) as two:
        yield two


def attended(world: World, db: str, backend: str) -> tuple[list[float], int, int]:
    """Relative deviations of the output and of three gradients, and the calls that were taken and left."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    device, mesh = world.device, DeviceMesh("cuda", list(range(world.size)))
    generator = torch.Generator(device).manual_seed(1)
    whole = [torch.randn(1, *SHAPE, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(4)]
    dense = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    expected = functional.scaled_dot_product_attention(*dense, is_causal=True)
    expected.backward(whole[3])
    autotax.torch.install(db, ["context_parallel_attention"])
    mine = [tensor.clone() for tensor in whole]
    with torch.nn.attention.sdpa_kernel(BACKENDS[backend]), context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 4):
        inputs = [tensor.detach().requires_grad_() for tensor in mine[:3]]
        output = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        output.backward(mine[3])
    gradients = [tensor.grad for tensor in inputs]
    results: list[Tensor] = context_parallel_unshard(mesh, [output.detach(), *gradients], [2] * 4)
    status = autotax.torch.status()
    autotax.torch.uninstall()
    right = [expected.detach(), *[tensor.grad for tensor in dense]]
    far = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(results, right, strict=True)]
    return far, status.taken, status.left


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("variant", ["decomposed", "push_specialized"])
def test_outputs_and_gradients_are_those_of_dense_attention(ranks: Ranks, tmp_path: Path, variant: str, backend: str) -> None:
    here = detect()
    problem = GatherAttention(1, HEADS, HEADS, DIM, TOKENS, world_size=2, layout="zigzag")
    with Store.open(f"sqlite:///{tmp_path / 'a.db'}") as store:
        config = space_for(problem, here).default(variant)
        keep_winner(store, problem, config, here, environment(here.backend), Conditions.usual(on_gpu=True))
    for far, taken, left in ranks.run(attended, str(tmp_path / "a.db"), backend, timeout=100):
        assert (taken, left) == (1, 0)
        assert max(far) < 2e-2, far
