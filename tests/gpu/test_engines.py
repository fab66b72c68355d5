"""The pass over vLLM's compiled graphs on real GPUs: Inductor compiles them, and a CUDA graph captures the compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass

import autotax.torch
from autotax.engines import norm_pass, norms
from autotax.engines import vllm as vllm_plugin
from autotax.engines.norms import LEFT, SUMMED, WHOLE
from autotax.heap.world import World
from autotax.operators.problems import AllReduceNorm, GemmReduceScatter
from autotax.operators.scaled import SCALES_OF
from autotax.runner.ranks import Ranks
from autotax.torch.normed import NORMED
from tests.engines import stand_ins
from tests.engines.checks import Blocks, QuantisingBlock, asking
from tests.torch.checks import normal
from tests.torch.winners import database, usual

pytestmark = pytest.mark.gpu

WORLD, HIDDEN, COLUMNS = 2, 2048, 4096
MOST, FEWER = 16, 13
"""Numbers of tokens that one winner serves."""
REPLAYS = 100


class Passes(CustomGraphPass):
    """The passes of a manager of vLLM, as its compiler hands them to Inductor."""

    def __init__(self, manager: stand_ins.PostGradPassManager) -> None:
        self.manager, self.fused = manager, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.fused += sum(pass_(graph) for pass_ in self.manager.passes)

    def uuid(self) -> Any:
        return None  # not cached, so that the passes run


def compiled_and_captured(
    world: World, db: str, fastest: str, quantize: str, kind: type[Any]
) -> tuple[int, set[str], int, float]:
    """A layer and its norm, compiled, captured for two numbers of tokens and replayed with other inputs: the pairs of nodes that
    became one, the ways taken, the calls that were one kernel, and the worst error.
    """
    us = {SUMMED: 2.0, LEFT: 2.0, WHOLE: 2.0, fastest: 1.0}
    device = torch.get_default_device()
    torch.set_default_device(world.device)
    torch._dynamo.reset()
    try:
        with (
            asking(db), stand_ins.vllm(), torch.no_grad(),
            mock.patch.object(norms, "least_microseconds", side_effect=[us[way] for way in (SUMMED, LEFT, WHOLE)]),
        ):  # fmt: skip
            vllm_plugin.register()
            blocks, manager = kind(quantize, COLUMNS, HIDDEN), stand_ins.PostGradPassManager()
            manager.configure(stand_ins.VllmConfig())
            passes = Passes(manager)
            with inductor.patch(post_grad_custom_post_pass=passes, enable_auto_functionalized_v2=False):  # as vLLM sets it
                compiled = torch.compile(blocks, fullgraph=True, dynamic=True)
                inputs = [drawn(world, tokens, 0) for tokens in (MOST, FEWER)]
                for x, residual in inputs:
                    compiled(x, residual)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outs = [compiled(x, residual) for x, residual in inputs]
            worst = 0.0
            for replay in range(1, REPLAYS + 1):
                for x, residual in inputs:
                    for here, there in zip((x, residual), drawn(world, len(x), replay), strict=True):
                        here.copy_(there)
                graph.replay()
                for (x, residual), out in zip(inputs, outs, strict=True):
                    weight = blocks.norms[0] if kind is Blocks else blocks.norm
                    right = stand_ins.fused_add_rms_norm(summed(blocks, x), residual.float(), weight.float(), 1e-5)[0]
                    if quantize == "static" and kind is QuantisingBlock:  # codes saturate
                        right.clamp_(-448 * blocks.scale, 448 * blocks.scale)
                    worst = max(worst, float((out[0].float() - right).norm() / right.norm()))
            calls = autotax.torch.status().calls
            kernels = sum(call.calls for call in calls if call.taken and call.operator == NORMED)
            return passes.fused, {*norm_pass.chosen.values()}, kernels, worst
    finally:
        torch.set_default_device(device)


def drawn(world: World, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of this rank, and a residual that all ranks have."""
    x = normal(tokens, COLUMNS // world.size, seed=100 * seed + 10 + world.rank)
    return x.bfloat16(), normal(tokens, HIDDEN, seed=100 * seed + 7).bfloat16()


def summed(blocks: Any, x: Tensor) -> Tensor:
    """The sum of the layer's products in float32, of inputs that are quantised as the layer says."""
    layer = blocks.layer
    weight = layer.weight if not hasattr(layer, "weight_scale") else None
    total = x.float() @ weight.float().t() if weight is not None else layer.quant_method.kernel.multiply(layer, x.float())
    dist.all_reduce(total)
    return total


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD, "cuda") as pool:
        yield pool


KINDS = {"bf16": ("", "none"), "e4m3": ("row", "none"), "quantised by row": ("row", "row"), "static": ("static", "tensor")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [WHOLE, SUMMED, LEFT])
def test_a_compiled_layer_and_its_norm_are_one_operator_in_captures(ranks: Ranks, tmp_path: Path, way: str, kind: str) -> None:
    quantize, quant = KINDS[kind]
    front: Any = {"scales": SCALES_OF[quantize], "quantize": quantize} if quantize else {}
    behind = AllReduceNorm(MOST, HIDDEN, "bf16", WORLD, quant=quant, k=COLUMNS // WORLD, **front)
    product = GemmReduceScatter(MOST, HIDDEN, COLUMNS // WORLD, "e4m3" if quantize else "bf16", "replicated", WORLD, **front)
    alone = AllReduceNorm(MOST, HIDDEN, "bf16", WORLD, quant=quant)
    variants = {product: "scaled_words", behind: "scaled_fused"} if quantize else {product: "words", behind: "fused"}
    kept = {problem: usual(problem, variant, "cuda") for problem, variant in (variants | {alone: "one_shot"}).items()}
    db = database(tmp_path / "a.db", kept, "cuda")
    block = Blocks if quant == "none" else QuantisingBlock
    for fused, ways, kernels, worst in ranks.run(compiled_and_captured, db, way, quantize, block, timeout=200):
        assert (fused, ways) == (1, {way})
        # Once to see that there is one, then in the two calls and the two captures.
        assert kernels == (5 if way == WHOLE else 1)
        assert worst < (2e-2 if quant == "none" else 4e-2)
