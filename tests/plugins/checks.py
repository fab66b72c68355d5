"""What the plugins must do in a process of their framework, as functions that run on all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotax.torch
from autotax.db import lookup
from autotax.heap.world import World
from autotax.plugins import sglang as sglang_plugin
from autotax.plugins import vllm as vllm_plugin
from autotax.torch import plans
from autotax.torch.status import Status
from tests.plugins import stand_ins
from tests.torch.checks import normal

N, K = 24, 80


@contextmanager
def asking(db: str) -> Iterator[None]:
    """A process whose user has this database."""
    with mock.patch.dict(os.environ, AUTOTAX_DB=db):
        lookup.reload()
        plans.use(plans.Deployment())
        try:
            yield
        finally:
            autotax.torch.uninstall()
            lookup.reload()


def summed(layer: Any, x: Tensor) -> Tensor:
    """The product of a layer, added up in plain torch."""
    total = nn.functional.linear(x, layer.weight)
    dist.all_reduce(total)
    return total


def vllm_layers(world: World, db: str) -> tuple[Status, dict[str, int], list[str]]:
    """Calls of several layers of vLLM; what was counted, sums that vLLM did itself by layer, and the layers' classes."""
    with asking(db), stand_ins.vllm():
        vllm_plugin.register()
        kinds: dict[str, dict[str, Any]] = {
            "plain": {"bias": False},
            "bias to be added later": {"bias": True, "skip_bias_add": True},
            "bias": {"bias": True},
            "quantized": {"bias": False, "quant_config": stand_ins.Quantized()},
            "without a winner": {"bias": False, "output_size": N + 8},
        }
        sums, classes = {}, []
        for name, options in kinds.items():
            layer = stand_ins.RowParallelLinear(K, **({"output_size": N} | options))
            classes.append(type(layer).__name__)
            for tokens in (16, 14, 50):
                x = normal(tokens, K // world.size, seed=tokens + world.rank)
                before = stand_ins.the_group().sums
                output, bias = layer(x)
                sums[name] = sums.get(name, 0) + stand_ins.the_group().sums - before
                added = layer.bias if layer.bias is not None and not layer.skip_bias_add else 0
                torch.testing.assert_close(output, summed(layer, x) + added, rtol=1e-4, atol=1e-4)
                assert bias is (layer.bias if layer.skip_bias_add else None)
        return autotax.torch.status(), sums, classes


def vllm_compiled(world: World, db: str) -> Status:
    """A layer of vLLM, compiled with a number of tokens that varies."""
    with asking(db), stand_ins.vllm():
        vllm_plugin.register()
        layer = stand_ins.RowParallelLinear(K, N, bias=False, return_bias=False)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        for tokens in (16, 14, 16):
            x = normal(tokens, K // world.size, seed=tokens + world.rank)
            torch.testing.assert_close(compiled(x), summed(layer, x), rtol=1e-4, atol=1e-4)
        return autotax.torch.status()


def sglang_layers(world: World, db: str) -> tuple[Status, int]:
    """Calls of SGLang's layers, by its hooks; what was counted, and sums that SGLang did itself."""
    with asking(db), stand_ins.sglang() as owners:
        sglang_plugin.register()
        stand_ins.HookRegistry.apply_hooks(owners)
        layer, x = stand_ins.SglangRowParallelLinear(K, N), normal(16, K // world.size, seed=world.rank)
        output, _ = layer(x)
        torch.testing.assert_close(output, summed(layer, x), rtol=1e-4, atol=1e-4)
        mine = stand_ins.the_group().sums
        skipped, _ = layer(x, skip_all_reduce=True)
        torch.testing.assert_close(skipped, nn.functional.linear(x, layer.weight))
        stand_ins.flags.quantized = True
        layer(x)
        stand_ins.flags.quantized = False
        assert stand_ins.the_group().sums == mine + 1
        columns, rows = nn.Linear(K // 2, N, bias=False).requires_grad_(False), normal(8, K // 2, seed=world.rank)
        stand_ins.flags.tokens = 15
        found = sys.modules["sglang.srt.layers.layernorm_sp"].column_parallel_g_matmul(columns, rows, None)
        whole = torch.cat([normal(8, K // 2, seed=rank) for rank in range(world.size)])
        torch.testing.assert_close(found, columns(whole)[:15], rtol=1e-4, atol=1e-4)
        return autotax.torch.status(), mine
