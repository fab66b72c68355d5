"""A small Llama of torchtitan, trained on all ranks: by torchtitan's own collectives, and with its fused products on ours.

Two features need CUDA and are replaced. FlexAttention has no backward on CPUs: torchtitan's module around torch's scaled dot
product takes its place. `torch.mm(..., out_dtype=)` is replaced, too. The model is sharded by torchtitan's plan for tensor
parallelism. FSDP would have degree 1 here and is left out: FSDP of torch 2.13 does not accept torchtitan's plain tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import autotax.torch
from autotax.heap.world import World
from autotax.torch.plans import Status

STEPS, BATCH, TOKENS, LAYERS, VOCABULARY = 3, 2, 32, 2, 2048
ROWS, DIM, QKV, HIDDEN = BATCH * TOKENS, 256, 384, 384
"""Rows over both ranks; columns of QKV and of w1 and w3 on each, which torchtitan's debug model has."""
_mm = torch.mm


def trained(world: World, db: str) -> tuple[list[float], list[float], Status]:
    """Losses with torchtitan's default projections, and with the fused ones on our operators; what those ran."""
    import torchtitan.tools.utils as tools

    tools.device_type, tools.device_module = "cpu", torch.cpu  # before others import the name
    default, _ = _losses(world, "default", [])
    override = [("autotax.engines.torchtitan.tuned", {"db": db})]
    try:
        fused, status = _losses(world, "dist_gemm", override)
    finally:
        autotax.torch.uninstall()
    return default, fused, status


def _losses(world: World, backend: str, overrides: list[Any]) -> tuple[list[float], Status]:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import ParallelismConfig
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    config = _config(backend)
    apply_overrides(OverrideConfig(imports=overrides), config)
    dims = ParallelDims.from_config(ParallelismConfig(tensor_parallel_degree=world.size), world.size)
    dims.build_mesh()
    model = config.build()
    torch.manual_seed(1)
    model.init_states()  # whole, and then sharded: both models begin alike
    model.parallelize(dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    positions = {"positions": torch.arange(TOKENS).expand(BATCH, -1)}
    context, losses = utils.get_spmd_context(parallel_dims=dims), []
    for _ in range(STEPS):
        inputs, labels, more = annotate_input_spmd_types(dims, tokens[:, :-1], tokens[:, 1:], dict(positions))
        with context(), mock.patch.object(torch, "mm", _mm_of_any_type):
            loss = cross_entropy_loss(model(inputs, **more), labels, global_vocab_size=VOCABULARY) / labels.numel()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, autotax.torch.status()


def _config(backend: str) -> Any:
    """Torchtitan's debug model with fewer layers."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = model_registry("debugmodel", attn_backend="flex", tp_gemm_backend=backend).model
    config.layers = config.layers[:LAYERS]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=TOKENS)
    set_llama3_sharding_config(config, enable_sp=True)
    return config


def _mm_of_any_type(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    return _mm(a, b, **more) if out_dtype is None else _mm(a.to(out_dtype), b.to(out_dtype))
