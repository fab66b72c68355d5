"""Checks of the plugins in a process of their framework: functions that run on all ranks."""

from __future__ import annotations

import itertools
import logging
import math
import operator
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor

import autotax.torch
from autotax.core.problem import Problem
from autotax.db import Store, lookup, reproof
from autotax.db.records import Place
from autotax.engines import merges, norms, thresholds
from autotax.engines import sglang as sglang_plugin
from autotax.engines import vllm as vllm_plugin
from autotax.heap.world import World
from autotax.operators import scaled
from autotax.spaces import space_for
from autotax.torch import plans
from autotax.torch.normed import NORMED
from autotax.torch.plans import Status
from tests.db.conftest import keep_winner
from tests.engines import stand_ins
from tests.torch.checks import normal

N, K = 24, 80
HEADS, DIM = 6, 16
HIDDEN = 256


@contextmanager
def asking(db: str) -> Iterator[None]:
    """A process whose user has this database."""
    with mock.patch.dict(os.environ, AUTOTAX_DB=db):
        lookup.reload()
        thresholds.forget_winners()
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


N8, K8 = 96, 512
FP8 = (("static", "tensor"), ("row", "tensor"), ("row", "channel"), ("block", "block"))
"""How engines quantise inputs, and what of a weight shares a scale."""
Kept = tuple[Status, list[int], list[str]]


def error_of(output: Tensor, layer: Any, x: Tensor, quantize: str) -> float:
    """The relative error of a result against the sum of dequantised products in float32."""
    most = float(getattr(layer, "input_scale_ub", math.inf))
    scales = layer.input_scale.view(1) if quantize == "static" else scaled.scales_of(x, quantize, most)
    codes = scaled.quantised(x, scales, quantize)
    total = scaled.dequantised(codes, scales, scaled.SCALES_OF[quantize], weight=False) @ stand_ins.numbers_of(layer).t()
    dist.all_reduce(total)
    return float((output.float() - total).norm() / total.norm())


def calls_of(world: World, layer: Any, quantize: str, run: Any) -> list[int]:
    """For 16, 14 and 50 tokens, whether the framework multiplied. Results are right."""
    own, before = [], layer.weight.data_ptr()
    for tokens in (16, 14, 50):
        x, products = normal(tokens, K8 // world.size, seed=tokens + world.rank).bfloat16(), layer.quant_method.kernel.products
        assert error_of(run(x), layer, x, quantize) < 1e-2
        own.append(layer.quant_method.kernel.products - products)
    assert layer.weight.data_ptr() == before
    return own


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that autotax logs."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("autotax")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def vllm_fp8(world: World, db: str, compiled: bool) -> Kept:
    """Layers of vLLM with FP8 weights; what was counted, the products that vLLM computed, and what was logged."""
    with asking(db), stand_ins.vllm(), logged() as lines:
        vllm_plugin.register()
        own: list[int] = []
        for quantize, of_weight, scale_ub in (*((*kind, None) for kind in FP8), ("row", "channel", 1.5)):
            method = stand_ins.Fp8LinearMethod(quantize, of_weight)
            method.kernel.scale_ub = scale_ub
            layer = stand_ins.RowParallelLinear(K8, N8, bias=False, quant_config=method, return_bias=False, prefix=of_weight)
            layer.quant_method.process_weights_after_loading(layer)
            own += calls_of(world, layer, quantize, torch.compile(layer, fullgraph=True, dynamic=True) if compiled else layer)
        for ue8m0, options in ((True, {}), (False, {"input_scale_ub": torch.ones(())})):
            method = stand_ins.Fp8LinearMethod("block", "block", ue8m0=ue8m0)
            layer = stand_ins.RowParallelLinear(K8, N8, bias=False, quant_config=method, return_bias=False, prefix="odd")
            vars(layer).update(options)
            layer.quant_method.process_weights_after_loading(layer)
            own += calls_of(world, layer, "block", layer)
        return autotax.torch.status(), own, lines


def sglang_fp8(world: World, db: str) -> Kept:
    """The same for layers of SGLang."""
    with asking(db), stand_ins.sglang() as owners, logged() as lines:
        sglang_plugin.register()
        stand_ins.HookRegistry.apply_hooks(owners)
        own: list[int] = []
        methods = [stand_ins.SglangFp8LinearMethod(*kind) for kind in FP8]
        methods += [stand_ins.W8A8Fp8LinearMethod(), stand_ins.SglangFp8LinearMethod("block", "block", "ue8m0")]
        for method in methods:
            layer = stand_ins.SglangRowParallelLinear(K8, N8, quant_method=method)
            method.process_weights_after_loading(layer)
            own += calls_of(world, layer, method.kernel.quantize, lambda x: layer(x)[0])  # noqa: B023
        return autotax.torch.status(), own, lines


def sglang_fp8_of_shards(world: World, db: str) -> tuple[list[int], list[float]]:
    """Layers of SGLang's sequence-parallel region with FP8 weights: products that SGLang computed by call, and errors."""
    with asking(db), stand_ins.sglang() as owners:
        sglang_plugin.register()
        stand_ins.HookRegistry.apply_hooks(owners)
        sp, own, errors = sys.modules["sglang.srt.layers.layernorm_sp"], [], []
        method = stand_ins.SglangFp8LinearMethod("row", "channel")
        layer = stand_ins.SglangRowParallelLinear(K8, N8, quant_method=method)
        method.process_weights_after_loading(layer)
        for tokens in (16, 15, 50):
            x = normal(tokens, K8 // world.size, seed=tokens + world.rank).bfloat16()
            before = method.kernel.products
            output = sp.row_parallel_gbar_matmul(layer, x, None)
            own.append(method.kernel.products - before)
            padded = nn.functional.pad(x, (0, 0, 0, -tokens % world.size))
            right = scaled.scales_of(padded, "row") * scaled.quantised(padded, scaled.scales_of(padded, "row"), "row").float()
            right = right @ stand_ins.numbers_of(layer).t()
            dist.all_reduce(right)
            errors.append(float((output.float() - right.chunk(world.size)[world.rank]).norm() / right.norm()))
        for rows in (8, 25):
            stand_ins.flags.tokens, before = rows * world.size - 1, method.kernel.products
            shards = [normal(rows, K8 // world.size, seed=rank).bfloat16() for rank in range(world.size)]
            output = sp.column_parallel_g_matmul(layer, shards[world.rank], None)
            own.append(method.kernel.products - before)
            right = method.kernel.multiply(layer, torch.cat(shards))[:-1].float()
            errors.append(float((output.float() - right).norm() / right.norm()))
        return own, errors


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
        product = sys.modules["sglang.srt.layers.layernorm_sp"].column_parallel_g_matmul(columns, rows, None)
        whole = torch.cat([normal(8, K // 2, seed=rank) for rank in range(world.size)])
        torch.testing.assert_close(product, columns(whole)[:15], rtol=1e-4, atol=1e-4)
        return autotax.torch.status(), mine


def partial(world: World, tokens: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the attention of some tokens."""
    return normal(tokens, HEADS, DIM, seed=tokens + world.rank), 3 * normal(tokens, HEADS, seed=50 + tokens + world.rank)


def vllm_merges(world: World, dbs: list[str]) -> list[int]:
    """Merges of vLLM, by their name in its module and in one that imported it; those that vLLM did itself, by call."""
    with asking(dbs[world.rank]), stand_ins.vllm():
        vllm_plugin.register()
        dcp, backend = (sys.modules[f"vllm.v1.attention.{name}"] for name in ("ops.dcp", "backends.flash_attn"))
        group, own = stand_ins.the_group(), []
        assert backend.dcp_a2a_lse_reduce is dcp.dcp_a2a_lse_reduce is not stand_ins.dcp_a2a_lse_reduce
        for name, tokens, base_on_e in (
            ("dcp_a2a_lse_reduce", 8, True), ("cp_lse_ag_out_rs", 7, True), ("dcp_a2a_lse_reduce", 30, True),
            ("dcp_a2a_lse_reduce", 8, False), ("cp_lse_ag_out_ar", 8, True),
        ):  # fmt: skip
            o, lse = partial(world, tokens)
            expected = getattr(stand_ins, name)(o, lse, group, None, True, base_on_e)
            before = group.sums
            outputs = getattr(dcp, name)(o, lse, cp_group=group, return_lse=True, is_lse_base_on_e=base_on_e)
            own.append(group.sums - before)
            torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
        with mock.patch("autotax.nn.groups.capturing", return_value=True):
            thresholds.forget_winners()
            before = group.sums
            dcp.cp_lse_ag_out_rs(*partial(world, 8), group)
            own.append(group.sums - before)
        merges.forget(group)
        return own


def sglang_merges(world: World, db: str) -> list[int]:
    """Merges of SGLang by its hooks; those that SGLang did itself, by call."""
    with asking(db), stand_ins.sglang() as owners:
        sglang_plugin.register()
        stand_ins.HookRegistry.apply_hooks(owners)
        comm, group, own = sys.modules["sglang.srt.layers.dcp.comm"], stand_ins.the_group(), []
        for name, plain, more in (
            ("dcp_a2a_lse_reduce", stand_ins.sglang_a2a_lse_reduce, {}),
            ("dcp_a2a_lse_reduce", stand_ins.sglang_a2a_lse_reduce, {"comm_backend": "fi_a2a"}),
            ("cp_lse_ag_out_rs_mha", stand_ins.cp_lse_ag_out_rs_mha, {"return_lse": True}),
            ("cp_lse_ag_out_rs_mla", stand_ins.cp_lse_ag_out_rs_mla, {"is_lse_base_on_e": True}),
            ("cp_lse_ag_out_rs_mla", stand_ins.cp_lse_ag_out_rs_mla, {}),
        ):
            o, lse = partial(world, 8)
            expected = plain(o, lse, group, **more)  # type: ignore[operator]
            before = group.sums
            outputs = getattr(comm, name)(o, lse, group, **more)
            own.append(group.sums - before)
            torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
        merges.forget(group)
        return own


def norm_inputs(world: World, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's partial sums, the residual and the weight of a norm."""
    return normal(tokens, HIDDEN, seed=tokens + world.rank), normal(tokens, HIDDEN, seed=7), normal(HIDDEN, seed=8)


@contextmanager
def taking(*us: float) -> Iterator[None]:
    """Ways of a norm take so many microseconds, in turn. Each runs once, and its sums do not count as the framework's."""
    times = itertools.cycle(us)

    def least_microseconds(_world: World, _device: torch.device, way: Any) -> float:
        before = stand_ins.the_group().sums
        way()
        stand_ins.the_group().sums = before
        return next(times)

    with mock.patch.object(norms, "least_microseconds", least_microseconds):
        yield


def vllm_norms(world: World, dbs: list[str], us: tuple[float, float]) -> list[int]:
    """Norms of vLLM, by functions of eager models and by the compiler's operator, where vLLM's and ours take `us` microseconds;
    sums that vLLM did itself, by call.
    """
    with asking(dbs[world.rank]), stand_ins.vllm(), taking(*us):
        vllm_plugin.register()
        group, own = stand_ins.the_group(), []
        eager = sys.modules["vllm.models.some_model"].fused_allreduce_rms_norm
        gemma = sys.modules["vllm.model_executor.layers.fused_allreduce_gemma_rms_norm"].fused_allreduce_gemma_rms_norm
        layer = stand_ins.RowParallelLinear(K, HIDDEN, bias=False, reduce_results=False)
        for run, plain, tokens in (
            (eager, stand_ins.fused_allreduce_rms_norm, 8), (eager, stand_ins.fused_allreduce_rms_norm, 7),
            (eager, stand_ins.fused_allreduce_rms_norm, 30), (gemma, stand_ins.fused_allreduce_gemma_rms_norm, 8),
        ):  # fmt: skip
            _, residual, weight = norm_inputs(world, tokens)
            x, _ = layer(normal(tokens, K // world.size, seed=world.rank))
            norm = stand_ins.RMSNorm(weight, int(run is gemma))
            expected, before = plain(x.clone(), residual.clone(), norm), group.sums
            outputs = run(x, residual, norm)
            own.append(group.sums - before)
            torch.testing.assert_close(tuple(outputs), tuple(expected), rtol=1e-4, atol=1e-4)
        fused = torch.ops.vllm.flashinfer_trtllm_fused_allreduce_norm
        calls = ((False, False, 8), (False, True, 8), (True, False, 8), (False, False, 30), (True, True, 8))
        for quant, with_out, tokens in calls:
            x, residual, weight = norm_inputs(world, tokens)
            tensors = []
            for call in (stand_ins.call_trtllm_fused_allreduce_norm, fused):
                zero = torch.zeros_like(residual) if with_out and not quant else residual
                some = [x.clone(), zero.clone(), torch.zeros_like(x) if with_out else None]
                quantised = torch.zeros(x.shape).to(torch.float8_e4m3fn) if quant else None
                scale = torch.full((1,), 1 / 32) if quant else None
                before = group.sums
                call(*some[:2], weight, 1e-5, 2, True, True, 64, 1, some[2], quantised, None, scale, 0.0)
                # With a quantised result alone the first tensor is free for anything.
                tensors.append([tensor for tensor in (*some[quant and not with_out :], quantised) if tensor is not None])
            own.append(group.sums - before)
            for one, two in zip(*tensors, strict=True):
                close = {"rtol": 0.08, "atol": 1e-2} if quant else {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(two.float(), one.float(), **close)
        captures = mock.Mock(return_value=True)
        with mock.patch("autotax.nn.groups.capturing", captures), mock.patch.object(norms, "capturing", captures):
            norms.forget(group)
            x, residual, weight = norm_inputs(world, 8)
            before = group.sums
            eager(x, residual, stand_ins.RMSNorm(weight))
            own.append(group.sums - before)
        norms.forget(group)
        return own


def sglang_norms(world: World, db: str, us: tuple[float, float]) -> list[int]:
    """Norms of SGLang by its hooks, where SGLang's and ours take `us` microseconds; sums that SGLang did itself, by call."""
    with asking(db), stand_ins.sglang() as owners, taking(*us):
        sglang_plugin.register()
        stand_ins.HookRegistry.apply_hooks(owners)
        layernorm = sys.modules["sglang.srt.layers.layernorm"]._forward_with_allreduce_fusion
        fused = sys.modules["sglang.kernels.ops.communication.all_reduce_fusion"].all_reduce_residual_norm
        group, own = stand_ins.the_group(), []
        for tokens, more, use in ((8, None, True), (8, None, False), (8, 1.0, True), (30, None, True)):
            x, residual, weight = norm_inputs(world, tokens)
            norm, added = stand_ins.RMSNorm(weight), None if more is None else torch.ones_like(residual)
            expected = stand_ins._forward_with_allreduce_fusion(norm, x, residual, added, weight, use)
            before = group.sums
            outputs = layernorm(norm, x, residual, added, weight, use)
            own.append(group.sums - before)
            torch.testing.assert_close(tuple(outputs), tuple(expected), rtol=1e-4, atol=1e-4)
        for gemma, out, two_shot in ((False, True, None), (True, False, None), (False, False, True)):
            x, residual, weight = norm_inputs(world, 8)
            options = {"world_size": 2, "gemma": gemma, "two_shot": two_shot}
            expected = stand_ins.all_reduce_residual_norm(x, residual, weight, 1e-5, **options)
            before, into = group.sums, residual if out else None
            outputs = fused(x, residual, weight, 1e-5, residual_out=into, **options)
            own.append(group.sums - before)
            assert not out or outputs[1] is residual
            torch.testing.assert_close(tuple(outputs), tuple(expected), rtol=1e-4, atol=1e-4)
        norms.forget(group)
        return own


def sums_left(world: World, layer: Any, norm: Any, run: Any, plain: Any) -> tuple[list[tuple[int, bool]], int]:
    """Calls of a layer and the norm behind it: for each, sums of the framework, and whether the product was pending. Also calls
    of one kernel of product, sum and norm.

    The first call measures; the second is the fastest way. The third uses the layer's result otherwise. Then other tokens.
    """
    group, own = stand_ins.the_group(), []
    close = {"rtol": 2e-2, "atol": 0.1}
    for tokens, otherwise in ((16, False), (16, False), (16, True), (50, False)):
        x = normal(tokens, layer.input_size_per_partition, seed=world.rank + tokens).bfloat16()
        residual = normal(tokens, layer.output_size, seed=7).bfloat16()
        product = layer.quant_method.apply(layer, x, None)
        expected, before = plain(product.clone(), residual.clone(), norm), group.sums
        y, _ = layer(x)
        was = isinstance(y, norms.Pending)
        if otherwise:
            torch.testing.assert_close(y * 2, 2 * product, **close)
        outputs = run(y, residual.clone(), norm)
        own.append((group.sums - before, was))
        torch.testing.assert_close(tuple(outputs), tuple(expected), **close)
    return own, sum(call.calls for call in autotax.torch.status().calls if call.taken and call.operator == NORMED)


def vllm_sums_left(world: World, db: str, us: list[float], codes: bool = False) -> tuple[list[tuple[int, bool]], int]:
    """A layer of vLLM with `reduce_results=False` where the ways take `us` microseconds. `codes`: its weight is in e4m3."""
    with asking(db), stand_ins.vllm(), mock.patch.object(norms, "least_microseconds", side_effect=us):
        vllm_plugin.register()
        run = sys.modules["vllm.models.some_model"].fused_allreduce_rms_norm
        method = stand_ins.Fp8LinearMethod("row", "channel") if codes else None
        options = {"reduce_results": False, "params_dtype": torch.bfloat16, "quant_config": method}
        layer = stand_ins.RowParallelLinear(*(K8, N8) if codes else (K, N), bias=False, **options)
        if method:
            layer.quant_method.process_weights_after_loading(layer)
        norm = stand_ins.RMSNorm(normal(layer.output_size, seed=8).bfloat16())
        return sums_left(world, layer, norm, run, stand_ins.fused_allreduce_rms_norm)


class Blocks(nn.Module):
    """Row-parallel layers of vLLM with norms behind them: a usual one, one whose sum is used again, and one in float32."""

    def __init__(self, quantize: str, *sizes: int) -> None:
        super().__init__()
        self.layer = layer_of(quantize, *sizes)
        weights = (normal(self.layer.output_size, seed=seed).to(dtype) for seed, dtype in enumerate(DTYPES_OF_NORMS))
        self.norms = nn.ParameterList(nn.Parameter(weight, False) for weight in weights)

    def forward(self, x: Tensor, residual: Tensor) -> list[Tensor]:
        norm = torch.ops.vllm_ir.fused_add_rms_norm
        y, residual = norm(self.layer(x), residual, self.norms[0], 1e-5)
        again = self.layer(x + 1)
        used, residual = norm(again, residual, self.norms[1], 1e-5)
        wide, residual = norm(self.layer(x - 1), residual, self.norms[2], 1e-5)
        return [y, used, again, wide, residual]


class QuantisingBlock(nn.Module):
    """A row-parallel layer of vLLM with an FP8 weight, and behind it a norm that vLLM's passes have fused with a quantiser."""

    def __init__(self, quantize: str, *sizes: int) -> None:
        super().__init__()
        self.layer, self.quantize = layer_of(quantize, *sizes), quantize
        self.norm = nn.Parameter(normal(self.layer.output_size, seed=0).bfloat16(), False)
        self.scale = nn.Parameter(torch.tensor(1 / 64), False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """y as numbers, and the new residual."""
        total, kept = self.layer(x), residual.clone()
        y = torch.empty_like(total, dtype=torch.float8_e4m3fn)
        if self.quantize == "static":
            torch.ops._C.fused_add_rms_norm_static_fp8_quant(y, total, kept, self.norm, self.scale, 1e-5)
            return y.float() * self.scale, kept
        scales = total.new_empty((len(total), 1), dtype=torch.float32)
        torch.ops._C.rms_norm_dynamic_per_token_quant(y, total, self.norm, scales, 1e-5, None, kept)
        return y.float() * scales, kept


DTYPES_OF_NORMS = (torch.bfloat16, torch.bfloat16, torch.float32)


def layer_of(quantize: str, *sizes: int) -> Any:
    """A layer whose inputs have so many columns over all ranks, and whose outputs so many. Without `quantize` in bf16."""
    of_weight = {"row": "channel", "static": "tensor"}.get(quantize)
    method = stand_ins.Fp8LinearMethod(quantize, of_weight) if of_weight else None
    sizes = sizes or ((K8, N8) if of_weight else (K, N))
    more: dict[str, Any] = {"params_dtype": torch.bfloat16, "quant_config": method, "return_bias": False}
    layer = stand_ins.RowParallelLinear(*sizes, bias=False, **more)
    if method:
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def vllm_compiled_norms(
    world: World, db: str | list[str], us: list[float], quantize: str = "", kind: type[Any] = Blocks,
    scale_ub: float | None = None,
) -> tuple[int, list[int], int]:
    """Norms behind compiled row-parallel layers of vLLM, whose ways take `us` microseconds: how many pairs of nodes became one,
    the calls that were one kernel after each call of the graph, and the ways that were measured. `scale_ub`: of FP8 layers.
    """
    measured, db = mock.Mock(side_effect=us), db if isinstance(db, str) else db[world.rank]
    torch._dynamo.reset()  # a process compiles one function only so many times
    bounded = mock.patch.object(stand_ins.Quantising, "scale_ub", scale_ub)
    with asking(db), stand_ins.vllm(), mock.patch.object(norms, "least_microseconds", measured), bounded:
        vllm_plugin.register()
        blocks, fused, manager = kind(quantize), [], stand_ins.PostGradPassManager()
        manager.configure(stand_ins.VllmConfig())

        def compile_graph(module: torch.fx.GraphModule, _: Any) -> Any:
            with_sizes(module.graph)
            fused.extend(pass_(module.graph) for pass_ in manager.passes)
            module.graph.lint()
            module.recompile()
            return module

        compiled = torch.compile(blocks, backend=aot_autograd(fw_compiler=compile_graph), fullgraph=True, dynamic=True)
        kernels = []
        for tokens in (16, 14, 50, 16):
            x = normal(tokens, blocks.layer.input_size_per_partition, seed=tokens + world.rank).bfloat16()
            residual = normal(tokens, blocks.layer.output_size, seed=7).bfloat16()
            with torch.no_grad(), inductor.patch(enable_auto_functionalized_v2=False):  # as vLLM sets it
                outputs, expected = compiled(x, residual), blocks(x, residual)
            # A value that rounds otherwise gets the next code, up to an eighth away.
            torch.testing.assert_close(outputs, expected, rtol=0.13 if kind is QuantisingBlock else 2e-2, atol=5e-2)
            calls = autotax.torch.status().calls
            kernels.append(sum(call.calls for call in calls if call.taken and call.operator == NORMED))
        return sum(fused), kernels, measured.call_count


def with_sizes(graph: torch.fx.Graph) -> None:
    """Makes scales by the sizes of another node, as Inductor's graphs have them."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.new_empty.default):
        with graph.inserting_before(node):
            rows, columns = (graph.call_function(torch.ops.aten.sym_size.int, (node.args[0], place)) for place in (0, 1))
            one = graph.call_function(operator.floordiv, (columns, columns))
            made = graph.call_function(torch.ops.aten.empty.memory_format, ([rows, one],), {"dtype": node.kwargs["dtype"]})
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def sglang_sums_left(world: World, db: str, us: list[float]) -> tuple[list[tuple[int, bool]], int]:
    """The same of SGLang."""
    with asking(db), stand_ins.sglang() as owners, mock.patch.object(norms, "least_microseconds", side_effect=us):
        sglang_plugin.register()
        stand_ins.HookRegistry.apply_hooks(owners)
        fused = sys.modules["sglang.srt.layers.layernorm"]._forward_with_allreduce_fusion
        plain = stand_ins._forward_with_allreduce_fusion

        def calling(function: Any) -> Any:
            return lambda x, residual, norm: function(norm, x, residual, None, norm.weight)

        layer = stand_ins.SglangRowParallelLinear(K, N, reduce_results=False).bfloat16()
        return sums_left(world, layer, stand_ins.RMSNorm(normal(N, seed=8).bfloat16()), calling(fused), calling(plain))


def vllm_with_databases(world: World, dbs: list[str]) -> tuple[Status, int]:
    """A row-parallel layer where each rank has a database of its own; what was counted, and sums that vLLM did itself."""
    with asking(dbs[world.rank]), stand_ins.vllm():
        vllm_plugin.register()
        layer, x = stand_ins.RowParallelLinear(K, N, bias=False), normal(16, K // world.size, seed=world.rank)
        torch.testing.assert_close(layer(x)[0], summed(layer, x), rtol=1e-4, atol=1e-4)
        return autotax.torch.status(), stand_ins.the_group().sums


def vllm_proving(world: World, db: str, seconds: str, captures: bool) -> tuple[list[str], list[str], int]:
    """A row-parallel layer and a merge of vLLM whose winners are stale; the log's lines, the problems whose proof began on this
    rank, and the sums that vLLM did itself in a call.
    """
    lines, begun = [], []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def proven(problems: list[Problem], here: Place, db: str, bound: reproof.Bound) -> str:
        begun.extend(problem.key for problem in problems)
        with Store.open(db) as store:
            for problem in problems:
                config = space_for(problem, here.hardware).default("gather" if problem.op == "decode-merge" else "push")
                keep_winner(store, problem, config, here.hardware, here.software, here.conditions)
        assert bound.whole(len(problems)) == reproof.START_S + float(seconds) * len(problems)
        return ""

    handler, captured = Lines(), mock.Mock(return_value=captures)
    capturing = [mock.patch(f"autotax.nn.{module}.capturing", captured) for module in ("groups", "consensus")]
    variables = mock.patch.dict(os.environ, {reproof.VARIABLE: seconds})
    thresholds.log.addHandler(handler)
    try:
        with asking(db), stand_ins.vllm(), variables, mock.patch.object(reproof, "_refreshed", proven):
            vllm_plugin.register()
            with capturing[0], capturing[1]:
                layer = stand_ins.RowParallelLinear(K, N, bias=False)
                o, lse = partial(world, 8)
                sys.modules["vllm.v1.attention.ops.dcp"].dcp_a2a_lse_reduce(o, lse, stand_ins.the_group())
            x, before = normal(16, K // world.size, seed=world.rank), stand_ins.the_group().sums
            torch.testing.assert_close(layer(x)[0], summed(layer, x), rtol=1e-4, atol=1e-4)
            return lines, begun, stand_ins.the_group().sums - before
    finally:
        thresholds.log.removeHandler(handler)
