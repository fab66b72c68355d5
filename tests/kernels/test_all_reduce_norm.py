"""All-Reduce + RMSNorm beyond what every variant must do: each output bit by bit, fewer rows between more, missing ranks."""

from __future__ import annotations

import hashlib
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config, Value
from autotax.core.errors import UsageError
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels.all_reduce_norm.norm import e4m3, quotients
from autotax.kernels.offline import known_hardware
from autotax.nn import AllReduceNorm as AllReduceNormModule
from autotax.nn import LinearAllReduce
from autotax.operators import named
from autotax.operators.all_reduce_norm import EPS, addends, quantised, scales_of
from autotax.operators.problems import AllReduceNorm
from autotax.operators.verification import TOLERANCE, Calls, make_inputs
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance
from tests.engines import stand_ins
from tests.torch.winners import database
from tests.volume import volume

WORLD = 3
PROBLEM = AllReduceNorm(5, 1040, "bf16", WORLD)
WORDS: list[tuple[str, dict[str, Value]]] = [
    (variant, {"words": words, "num_warps": 4, "per_processor": 1} | more)
    for variant, more in (("one_shot", {"split": 2}), ("two_shot", {}))
    for words in ("blank", "epoch")
]
PUSH: list[tuple[str, dict[str, Value]]] = [
    ("push", {"shots": shots, "rows": 2, "ahead": 1, "owners": owners, "signals": signals, "num_warps": 4, "per_processor": 1})
    for shots, owners, signals in (("one", "straight", "at_once"), ("two", "turned", "late"), ("two", "straight", "late"))
]
ROWS = (5, 1, 2, 5, 1, 1, 1, 4, 5, 3)
PATIENCE = 400


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as three:
        yield three


def outputs_of(world: World, problem: AllReduceNorm, config: Config, rows: tuple[int, ...]) -> list[str]:
    """Digests of y, the new residual and the scales of calls; each rank is late by other times. Raises for what is wrong."""
    context, kernel = conformance.ready(world, problem, config)
    late, digests = random.Random(world.rank), []
    for seed, some in enumerate(rows):
        case = replace(problem, m=some)
        call = make_inputs(case, seed, world.rank, world.device)
        calls = list(Calls(case, seed, world.device))
        for tensors in (call, *calls):  # words that mean that nothing has come, if they are sent as they are
            tensors.tensors[0].view(torch.uint8).view(-1)[: 16 * (seed % 2)] = 0xFF
        call.poison()
        time.sleep(late.uniform(0, 0.01))
        fitted = kernel.fitted(case)
        assert fitted is not None
        fitted(*call.tensors, call.out)
        world.synchronize()
        assert kernel.failure() is None, kernel.failure()
        parts = addends(case, calls)
        new_residual, exact = call.tensors[2], sum(parts[1:], parts[0]).to(call.tensors[2].dtype)
        assert torch.equal(new_residual.isnan(), exact.isnan())
        assert torch.equal(new_residual.nan_to_num(), exact.nan_to_num()), "the new residual"
        scales = call.tensors[-1] if problem.quant != "none" else new_residual
        if problem.quant != "none":
            require_quantised(case, call.out, call.tensors[1], new_residual, scales)
        tensors = [tensor.nan_to_num().view(torch.uint8).cpu().numpy().tobytes() for tensor in (new_residual, scales)]
        codes = call.out.view(torch.uint8) if problem.quant != "none" else call.out.nan_to_num().view(torch.uint8)
        digests.append(hashlib.sha256(b"".join([*tensors, codes.cpu().numpy().tobytes()])).hexdigest()[:16])
    context.heap.close()
    return digests


def require_quantised(problem: AllReduceNorm, y: Tensor, weight: Tensor, new_residual: Tensor, scales: Tensor) -> None:
    """y and scales are what a quantiser makes of the norm, but for a few neighbours: squares are added in another order."""
    total = new_residual.float()
    factor = (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
    right = (total * factor * (weight.float() + problem.offset)).to(new_residual.dtype)
    if problem.quant != "tensor":
        torch.testing.assert_close(scales, scales_of(problem, right), rtol=2**-7, atol=0, equal_nan=True)
    apart = ordinals(y) - ordinals(quantised(problem, right, scales))
    assert apart.abs().max() <= 1
    assert (apart != 0).float().mean() <= 0.01


def ordinals(codes: Tensor) -> Tensor:
    """Places of e4m3 in their order."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.sampled(by=lambda variant, way: {"variant": (variant, way.get("shots")), "words": way.get("words")})
@pytest.mark.parametrize(("variant", "way"), WORDS + PUSH, ids=str)
def test_every_output_is_right_bit_by_bit_whoever_is_late(ranks: Ranks, variant: str, way: dict[str, Value]) -> None:
    config = Config.of(variant, way)
    assert config in space_for(PROBLEM, detect("cpu"))
    first, *others = ranks.run(outputs_of, PROBLEM, config, ROWS)
    assert others == [first] * (WORLD - 1)


@pytest.mark.parametrize("quant", ["tensor", "row", "block"])
@pytest.mark.parametrize(("variant", "way"), [WORDS[0], *volume(*WORDS[1:], *PUSH)], ids=str)
def test_quantised_outputs_are_what_a_quantiser_makes(ranks: Ranks, quant: str, variant: str, way: dict[str, Value]) -> None:
    problem = AllReduceNorm(4, 1152, "bf16", WORLD, quant=quant)
    first, *others = ranks.run(outputs_of, problem, Config.of(variant, way), (4, 1, 3, 4))
    assert others == [first] * (WORLD - 1)


@pytest.mark.parametrize(("variant", "way"), [PUSH[1], *volume(*WORDS, PUSH[0])], ids=str)
def test_a_rank_that_never_calls_is_named_by_all_others(ranks: Ranks, variant: str, way: dict[str, Value]) -> None:
    missing = 2
    said = ranks.run(conformance.note_without, PROBLEM, Config.of(variant, way), missing, PATIENCE)
    for rank, line in enumerate(said):
        if rank != missing:
            assert re.match(f"rank {rank} waited for flag .* of rank {missing}:", str(line))


class FlashInferComm(ModuleType):
    """Stands in for flashinfer.comm: the names and arguments that the peer uses."""

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm=1)

    @staticmethod
    def create_allreduce_fusion_workspace(
        *, backend: str, world_size: int, rank: int, max_token_num: int, hidden_dim: int, dtype: torch.dtype, comm_backend: Any
    ) -> Any:
        assert (backend, world_size, rank, dtype) == ("trtllm", WORLD, comm_backend.rank(), torch.bfloat16)
        return SimpleNamespace(room=(max_token_num, hidden_dim), group=comm_backend)

    @staticmethod
    def allreduce_fusion(
        *, input: Tensor, workspace: Any, pattern: int, launch_with_pdl: bool, residual_in: Tensor, residual_out: Tensor,
        norm_out: Tensor, rms_gamma: Tensor, rms_eps: float, fp32_acc: bool,
    ) -> None:  # fmt: skip
        assert (tuple(input.shape), pattern, launch_with_pdl, fp32_acc) == (workspace.room, 1, True, True)
        total = input.float()
        dist.all_reduce(total)
        residual_out.copy_(total + residual_in.float())
        norm_out.copy_(torch.nn.functional.rms_norm(residual_out.float(), rms_gamma.shape, rms_gamma.float(), rms_eps))


def flashinfer_errors(world: World, problem: AllReduceNorm) -> list[float]:
    comm, mnnvl = FlashInferComm("flashinfer.comm"), ModuleType("flashinfer.comm.mnnvl")
    mnnvl.TorchDistBackend = lambda group: SimpleNamespace(rank=lambda: dist.get_rank(group))  # type: ignore[attr-defined]
    whole = ModuleType("flashinfer")
    whole.comm = comm  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"flashinfer": whole, "flashinfer.comm": comm, "flashinfer.comm.mnnvl": mnnvl}):
        return conformance.errors_of(world, problem, Config("flashinfer"), 3)


def test_the_peer_calls_flashinfer_as_engines_do_and_only_where_it_is_installed(ranks: Ranks) -> None:
    for errors in ranks.run(flashinfer_errors, PROBLEM):
        assert max(errors) <= TOLERANCE["bf16"]
    peer = named("all-reduce-norm").peers["flashinfer"]
    assert not peer.where(PROBLEM, known_hardware("cuda:90")) and "flashinfer" not in sys.modules


class VllmReduce:
    """Stands in for vLLM's CustomAllreduce."""

    disabled = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        assert dist.get_backend(group) == "gloo" and isinstance(device, torch.device)
        self.group = group

    def all_reduce(self, inp: Tensor, *, out: Tensor, registered: bool = False) -> Tensor:
        assert not registered
        out.copy_(inp)
        dist.all_reduce(out, group=self.group)
        return out


class SglangReduce(VllmReduce):
    """Stands in for SGLang's CustomAllReduceV2."""

    max_push_size, obj = 2**24, "communicator"


def sglang_kernel(
    world_size: int, hidden_dim: int, cluster_size: int, out: Tensor, input: Tensor, norm_weight: Tensor, norm_eps: float,
    residual: Tensor, residual_out: Tensor, weight_offset: float, two_shot: bool, vecs_per_thread: int,
) -> None:  # fmt: skip
    assert (world_size, hidden_dim, cluster_size, two_shot, vecs_per_thread) == (WORLD, input.shape[1], 4, False, 1)
    total = input.float()
    dist.all_reduce(total)
    residual_out.copy_(total + residual.float())
    weight = norm_weight.float() + weight_offset
    out.copy_(torch.nn.functional.rms_norm(residual_out.float(), weight.shape, weight, norm_eps))


def engines_errors(world: World, problem: AllReduceNorm, name: str) -> list[float]:
    registered: list[Any] = []
    vllm, sglang = "vllm.distributed.device_communicators.custom_all_reduce", "sglang.srt.distributed.device_communicators"
    made = {
        vllm: {"CustomAllreduce": VllmReduce},
        f"{sglang}.custom_all_reduce_v2": {"CustomAllReduceV2": SglangReduce},
        "sglang.kernels.ops.communication": {
            "all_reduce_fusion": SimpleNamespace(
                register_comm=registered.append, fits_push_slot=lambda most, rows, columns: 0 < 2 * rows * columns <= most,
                _norm_launch=lambda *_: (False, 1, 4), _all_reduce_residual_norm_op=sglang_kernel,
            )
        },
    }  # fmt: skip
    with stand_ins.modules(**{path.replace(".", "__"): names for path, names in made.items()}):
        errors = conformance.errors_of(world, problem, Config(name), 3)
    assert registered == ["communicator"] * (name == "sglang")
    return errors


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_peers_call_the_kernels_of_engines_only_where_these_are_installed(ranks: Ranks, name: str) -> None:
    for errors in ranks.run(engines_errors, PROBLEM, name):
        assert max(errors) <= TOLERANCE["bf16"]
    assert not named("all-reduce-norm").peers[name].where(PROBLEM, known_hardware("cuda:90")) and name not in sys.modules


@triton.jit
def e4m3_kernel(out, values, COUNT: tl.constexpr, TARGET: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    tl.store(out + at, e4m3(tl.load(values + at), TARGET))


def codes_of(world: World, values: Tensor) -> Tensor:
    """Converts float32 values to e4m3 codes (uint8), as the kernels do."""
    values = values.to(world.device)
    out = torch.empty(len(values), dtype=torch.uint8, device=world.device)
    e4m3_kernel[(1,)](out, values, COUNT=len(values), TARGET=TARGETS[world.backend])
    return out.cpu()


TARGETS = {"cpu": "interpreter", "cuda": "cuda", "rocm": "hip"}


@triton.jit
def quotients_kernel(out, numbers, scales, TARGET: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) + tl.arange(0, 1)
    at = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    parts = tl.reshape(tl.load(numbers + at), [1, 1, 128])
    found = quotients(parts, tl.reshape(tl.load(scales + row), [1, 1]), TARGET)
    tl.store(out + at, tl.reshape(found, [1, 128]))


def quotients_of(world: World, numbers: Tensor, scales: Tensor) -> Tensor:
    """numbers [groups, 128] over scales [groups], as the kernels divide."""
    numbers, scales = numbers.to(world.device), scales.to(world.device)
    out = torch.empty_like(numbers)
    quotients_kernel[(len(numbers),)](out, numbers, scales, TARGET=TARGETS[world.backend])
    return out.cpu()


def test_e4m3_is_rounded_as_torch_does_and_saturates(ranks: Ranks) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    near = [torch.from_numpy(np.nextafter(between.numpy(), np.float32(sign * 1e9))) for sign in (-1, 1)]
    values = torch.cat([finite, between, *near, torch.tensor([torch.nan, torch.inf, -torch.inf, 449, -1e30, 1e-30])])
    values = torch.nn.functional.pad(values, (0, 1024 - len(values)))
    sign = torch.where(values.isnan(), 0x7F, 0xFF)  # that of a NaN says nothing
    right = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for output in ranks.run(codes_of, values):
        assert torch.equal(output & sign, right & sign)


BEHIND = AllReduceNorm(4, 384, "bf16", WORLD, quant="block", k=40)
"""Behind a product."""
BEHIND_CODES = AllReduceNorm(4, 384, "bf16", WORLD, quant="block", k=384, scales="row", quantize="row")
"""Behind a product of e4m3."""


def digests_behind(world: World, problem: AllReduceNorm, config: Config, rows: tuple[int, ...]) -> list[str]:
    """Digests of the outputs of calls behind a product, whose new residual must be right; each rank is late by other times."""
    context, kernel = conformance.ready(world, problem, config)
    late, digests = random.Random(world.rank), []
    for seed, some in enumerate(rows):
        case = replace(problem, m=some)
        call = make_inputs(case, 2 * seed, world.rank, world.device)
        call.poison()
        time.sleep(late.uniform(0, 0.01))
        fitted = kernel.fitted(case)
        assert fitted is not None
        fitted(*call.tensors, call.out)
        world.synchronize()
        assert kernel.failure() is None, kernel.failure()
        parts, new_residual = addends(case, list(Calls(case, 2 * seed, world.device))), call.tensors[case.operands + 1]
        torch.testing.assert_close(new_residual.float(), sum(parts[1:], parts[0]), rtol=1e-2, atol=3e-2)
        tensors = [tensor.view(torch.uint8).cpu().numpy().tobytes() for tensor in (new_residual, call.tensors[-1], call.out)]
        digests.append(hashlib.sha256(b"".join(tensors)).hexdigest()[:16])
    context.heap.close()
    return digests


@pytest.mark.parametrize(
    ("problem", "variant", "way"),
    [
        (BEHIND, "fused", {"words": "blank", "split": 2}),
        (BEHIND_CODES, "scaled_fused", {"words": "blank", "split": 2, "splits": 2, "quantised": "within"}),
        *volume(
            (BEHIND, "fused", {"words": "epoch", "split": 1}),
            (BEHIND, "fused", {"words": "blank", "split": 1}),
            (BEHIND_CODES, "scaled_fused", {"words": "epoch", "split": 1, "splits": 1, "quantised": "before"}),
        ),
    ],
    ids=str,
)
def test_products_summed_and_normed_by_one_kernel_have_equal_bits_on_all_ranks(
    ranks: Ranks, problem: AllReduceNorm, variant: str, way: dict[str, Value]
) -> None:
    config = Config.of(variant, space_for(problem, detect("cpu")).default(variant).values | way)
    assert config in space_for(problem, detect("cpu"))
    first, *others = ranks.run(digests_behind, problem, config, (4, 1, 4, 2))
    assert others == [first] * (WORLD - 1)
    said = ranks.run(conformance.note_without, problem, config, 2, PATIENCE)
    assert all(re.match(f"rank {rank} waited for flag .* of rank 2:", str(said[rank])) for rank in (0, 1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"k": 0, "quantize": "none"}, "scales is 'row' with k 0, dtype bf16; only a product .* give --k, and --dtype"),
        ({"dtype": "fp32"}, "with k 384, dtype fp32; only a product with results of 16 bits has scales"),
        ({"scales": "none"}, "quantize is 'row' without scales; only a product of e4m3 takes it: give --scales"),
        ({"quantize": "block"}, "scales is 'row' with quantize block; allowed is block: give --scales block"),
        ({"hidden": 264, "quant": "none"}, "hidden is 264 with scales row; it must be a multiple of 16: give another --hidden"),
        ({"k": 72}, "k is 72 with dtype e4m3, scales row; it must be a multiple of 16: pad k to 80"),
    ],
    ids=str,
)
def test_products_of_e4m3_that_cannot_be_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(BEHIND_CODES, **fields)


def layers_of(world: World, path: str) -> list[bool]:
    """Whether a layer runs the tuned kernel of product, sum and norm; its results are those of the layer and the norm module."""
    drawn = torch.Generator().manual_seed(world.rank)
    weight = torch.randn(BEHIND.hidden, BEHIND.k, generator=drawn).bfloat16()
    x = torch.randn(3, BEHIND.k, generator=drawn).bfloat16()
    shared = torch.Generator().manual_seed(9)
    residual, norm_weight = (torch.randn(*size, generator=shared).bfloat16() for size in ((3, BEHIND.hidden), (BEHIND.hidden,)))
    norm = AllReduceNormModule(BEHIND.hidden, BEHIND.m, quant=BEHIND.quant, device="cpu", db=path)
    layer = LinearAllReduce(torch.nn.Parameter(weight, requires_grad=False), None, BEHIND.m, sizes=[BEHIND.m], db=path, norm=norm)
    ran = list(layer._whole)
    apart = layer.normed(x, norm_weight, residual)
    layer._whole = {BEHIND.m: next(operator for operator in layer._prepared.operators if operator.problem == BEHIND)}  # type: ignore[union-attr]
    y, new_residual, scales = layer.normed(x, norm_weight, residual)
    torch.testing.assert_close(new_residual, apart[1], rtol=1e-2, atol=0.2)
    one, other = (codes.float() * factors.repeat_interleave(128, 1) for codes, factors in ((y, scales), (apart[0], apart[2])))
    torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)
    compiled = torch.compile(layer.normed, backend="aot_eager", fullgraph=True)(x, norm_weight, residual)
    for one, other in zip(compiled, (y, new_residual, scales), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    with pytest.raises(UsageError, match="residual is "):
        layer.normed(x, norm_weight, residual[:2])
    with pytest.raises(UsageError, match="residual is not given"):
        layer.normed(x, norm_weight)
    # The kernel adds no bias and has the norm of its layer: a layer that shares it and has others runs another way.
    biased = LinearAllReduce(layer.weight, like=layer, bias=torch.ones(BEHIND.hidden).bfloat16())
    other = AllReduceNormModule(BEHIND.hidden, BEHIND.m, quant=BEHIND.quant, device="cpu", eps=9.0)
    torch.testing.assert_close(biased.normed(x, norm_weight, residual)[1].float(), new_residual.float() + 1, rtol=1e-2, atol=0.2)
    flatter = LinearAllReduce(layer.weight, like=layer, norm=other).normed(x, norm_weight, residual)
    assert not torch.equal(flatter[2], scales)
    other.close()
    assert layer.failure() is None
    layer.close()
    norm.close()
    return [bool(ran), BEHIND.m in layer._apart]


@pytest.mark.volume
def test_a_layer_measures_the_kernel_of_product_sum_and_norm(ranks: Ranks, tmp_path: Path) -> None:
    path = database(tmp_path / "winners.db", {BEHIND: space_for(BEHIND, detect("cpu")).default("fused")})
    answers = ranks.run(layers_of, path)
    assert len(set(map(tuple, answers))) == 1
    assert answers[0][1], "measured"
