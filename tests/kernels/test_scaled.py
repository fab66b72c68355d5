"""e4m3 with scales: every variant on CPU ranks, equal bits with and without quantisation on the way, kernels of both makers."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels import prepare, scaled_product
from autotax.kernels.libraries import DeepGemm
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.kernels.quantising import quantised_by_kernel
from autotax.operators import registry, scaled
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.operators.scaled import SCALES_OF, laid_out, limit_scales, quantised, scales_of
from autotax.operators.verification import TOLERANCE, make_inputs
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance
from tests.volume import volume

WORLD, CALLS = 3, 3
SIZES = (21, 96, 256)
"""Ranks do not divide the rows, so there is padding."""
QUANTIZE = {scales: way for way, scales in SCALES_OF.items()}
LAYOUTS = ("row", "block", "tensor")
TARGETED = [("row", "cuda:90"), ("tensor", "cuda:90"), *product(LAYOUTS, ["hip:gfx942"])]


def problems(scales: str, world: int = WORLD, sizes: tuple[int, int, int] = SIZES) -> list[Any]:
    """Both operators with these scales: with and without quantisation, both outputs, both types of C; and A in e5m2."""
    way = QUANTIZE[scales]
    gradients = [
        AllGatherGemm(*sizes, "e4m3", "m", world, scales=scales, operand="e5m2"),
        GemmReduceScatter(*sizes, "e4m3", "scattered", world, scales=scales, operand="e5m2"),
    ] if scales == "tensor" else []  # fmt: skip
    return [
        *gradients,
        AllGatherGemm(*sizes, "e4m3", "m", world, scales=scales),
        AllGatherGemm(*sizes, "e4m3", "m", world, scales=scales, quantize=way, result="fp16"),
        GemmReduceScatter(*sizes, "e4m3", "scattered", world, scales=scales),
        GemmReduceScatter(*sizes, "e4m3", "replicated", world, scales=scales, quantize=way),
    ]


CASES = [
    (problem, variant)
    for scales in LAYOUTS
    for problem in problems(scales)
    for variant in space_for(problem, detect("cpu")).variants
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as pool:
        yield pool


def _of_blocks(problem: Any, variant: str) -> dict[str, object]:
    """Of the scales of blocks each problem, and each variant of an operator."""
    return {"problem": problem, "variant": (problem.op, variant)} if problem.scales == "block" else {}


@pytest.mark.sampled(by=_of_blocks)
@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_every_variant_is_right(ranks: Ranks, problem: Any, variant: str) -> None:
    space = space_for(problem, detect("cpu")).variants[variant]
    for config in space.some(3, Random(7)):
        errors = ranks.run(conformance.errors_of, problem, config, CALLS, timeout=120)
        assert max(map(max, errors)) <= TOLERANCE[problem.out_dtype], config


@pytest.mark.parametrize("problem", volume(*(problem for scales in LAYOUTS for problem in problems(scales))), ids=str)
def test_one_kernel_takes_calls_with_fewer_rows(ranks: Ranks, problem: Any) -> None:
    smaller = [replace(problem, m=rows) for rows in (21, 4, 1, 20, 21)]
    for name, space in space_for(problem, detect("cpu")).variants.items():
        errors = ranks.run(conformance.errors_of_sizes, problem, space.some(1, Random(7))[0], smaller, timeout=120)
        assert max(map(max, errors)) <= TOLERANCE[problem.out_dtype], name


def by_rows(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """vLLM's quantisation of rows by torch's operators: codes, and scales that follow no magnitude above `most`."""
    scales = (x.abs().amax(-1, keepdim=True).float().clamp(max=most) / 448).clamp(min=1 / (448 * 512))
    return (x.float() * scales.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def bits_of_both(world: World, problem: Any, config: Config, bounded: bool = False) -> list[str]:
    """Digests of a call that quantises, and of the same call for an A that torch has quantised.

    With `bounded` scales of rows have an upper bound, which half of the rows exceed.
    """
    context, kernel = conformance.ready(world, problem, config)
    codes_problem = replace(problem, quantize="none")
    _, codes_kernel = conformance.ready(world, codes_problem, config)
    digests = []
    for seed in (0, 1):
        call = make_inputs(problem, seed, world.rank, world.device)
        a, b, *of_a, of_b = call.tensors
        if problem.quantize == "row":
            most = float(a.abs().amax(-1).nanmedian()) if bounded else math.inf
            limit_scales(kernel, most)
            codes, scales = by_rows(a, most)
        else:
            scales = of_a[0] if of_a else scales_of(a, problem.quantize)
            codes = quantised(a, scales, problem.quantize)
        kernel(*call.tensors, call.out)
        other = torch.empty_like(call.out)
        codes_kernel(codes, b, laid_out(scales, problem.scales, weight=False), of_b, other)
        for out in (call.out, other):
            digests.append(hashlib.sha256(out.nan_to_num(7.0).view(torch.uint8).numpy().tobytes()).hexdigest()[:8])
    world.barrier()
    context.heap.close()
    return digests


QUANTISING = [(problem, variant) for problem, variant in CASES if problem.quantize != "none"]


def _of_operators(problem: Any, variant: str) -> dict[str, object]:
    """The variants of each operator, and its scales."""
    return {"variant": (problem.op, variant), "scales": (problem.op, problem.scales)}


@pytest.mark.sampled(by=_of_operators)
@pytest.mark.parametrize(("problem", "variant"), QUANTISING, ids=str)
def test_quantising_on_the_way_gives_the_bits_of_a_quantiser_before(ranks: Ranks, problem: Any, variant: str) -> None:
    config = space_for(problem, detect("cpu")).variants[variant].some(1, Random(7))[0]
    for first, second, third, fourth in ranks.run(bits_of_both, problem, config, timeout=120):
        assert (first, third) == (second, fourth)


@pytest.mark.parametrize(("problem", "variant"), [case for case in QUANTISING if case[0].quantize == "row"], ids=str)
def test_values_above_an_upper_bound_saturate(ranks: Ranks, problem: Any, variant: str) -> None:
    config = space_for(problem, detect("cpu")).variants[variant].some(1, Random(7))[0]
    for first, second, third, fourth in ranks.run(bits_of_both, problem, config, True, timeout=120):
        assert (first, third) == (second, fourth)


def test_a_kernel_without_a_quantiser_of_rows_takes_no_upper_bound() -> None:
    kernel = SimpleNamespace(config=Config.of("theirs"))
    limit_scales(kernel, math.inf)
    with pytest.raises(UsageError, match="variant theirs takes none"):
        limit_scales(kernel, 1.5)


def differences_of_quantisers(_: World, quantize: str, rows: int, most: float) -> list[int]:
    """Codes and scales of a kernel on its own that differ from torch's."""
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(rows)).bfloat16()
    x[0, :7], x[-1] = 0.0, 3.0e4
    static = torch.full((1,), 1 / 64) if quantize == "static" else None
    scales = scales_of(x, quantize) if static is None else static
    right = quantised(x, scales, quantize)
    if quantize == "row":
        right, scales = by_rows(x, most)
    nowhere = torch.zeros(2, dtype=torch.int64)
    codes, factors = quantised_by_kernel(x, static, SCALES_OF[quantize], nowhere, detect("cpu"), most)
    wrong = codes.view(torch.uint8) != right.view(torch.uint8)
    return [int(wrong.sum()), int((factors.reshape(scales.shape) != scales).sum())]


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize(("quantize", "most"), [*((quantize, math.inf) for quantize in SCALES_OF), ("row", 2.75)])
def test_a_kernel_that_quantises_on_its_own_gives_torchs_bits(ranks: Ranks, quantize: str, most: float, rows: int) -> None:
    assert ranks.run(differences_of_quantisers, quantize, rows, most, timeout=120) == [[0, 0]] * WORLD


def errors_when_turned(world: World, problem: Any, config: Config) -> list[float]:
    """Errors of calls whose tiles are computed as their transpose, as Hopper computes low tiles."""
    scaled_product.turned = lambda *_: True  # type: ignore[assignment]
    return conformance.errors_of(world, problem, config, CALLS)


@pytest.mark.parametrize("scales", ["row", *volume("block", "tensor")])
def test_tiles_are_right_as_their_transpose(scales: str) -> None:
    problem = AllGatherGemm(*SIZES, "e4m3", "m", 2, scales=scales)
    with Ranks(2) as pair:
        for product in ("16x64x2x4", "32x256x2x4", *(("16x64x2x4x2",) if scales != "block" else ())):
            errors = pair.run(errors_when_turned, problem, Config.of("bsp", product=product, splits=2), timeout=120)
            assert max(map(max, errors)) <= TOLERANCE[problem.out_dtype], product


@pytest.mark.parametrize(
    ("scales", "target", "sizes"),
    [("block", "cuda:90", "one"), *volume(("block", "cuda:90", "both"), *((*case, "both") for case in TARGETED))],
)
def test_kernels_compile(scales: str, target: str, sizes: str) -> None:
    """Each variant for few rows and for many, or for the first of both that it takes."""
    hardware, compiled = known_hardware(target), set[tuple[str, str, str]]()
    for sizes in ((64, 7168, 8192), (1024, 8192, 7168)):
        for problem in problems(scales, 2, sizes):
            space = space_for(problem, hardware)
            for name in space.variants:
                kernel = (problem.op, problem.quantize, name)
                if sizes == "both" or kernel not in compiled:
                    compile_offline(problem, space.default(name), hardware)
                compiled.add(kernel)


def test_an_alternative_of_torch_has_the_config_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its config a layer tells a kernel that it can serve from one that failed."""
    made: list[Any] = []
    monkeypatch.setattr("autotax.kernels.offline.prepare", lambda *args: made.append(prepare(*args)) or made[-1])
    hardware = known_hardware("cuda:90")
    for problem in problems("row", 2, (64, 7168, 8192)):
        space = space_for(problem, hardware)
        for name in (name for name in space.variants if name.startswith("torch_") and name.endswith("_scaled")):
            compile_offline(problem, space.default(name), hardware)
            assert made[-1].config == space.default(name)
    ways = ("reduce_scatter", "one_shot", "two_shot")
    assert {kernel.config.variant for kernel in made} == {f"torch_{way}_scaled" for way in ways}


@pytest.mark.parametrize("name", ["fp8_gemm_nt", "gemm_fp8_fp8_bf16_nt"])
def test_deep_gemm_is_an_alternative_where_it_is_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either name of its function, and for scales of blocks alone."""
    calls: list[Any] = []
    for problem in (case for scales in LAYOUTS for case in problems(scales, 2)):
        where = registry.of(problem).peers["nccl_deep_gemm"].where
        assert not where(problem, known_hardware("cuda:90"))
        with monkeypatch.context() as patch:
            patch.setattr(scaled, "find_spec", lambda _: True)
            assert where(problem, known_hardware("cuda:90")) == ((problem.scales, problem.result) == ("block", "bf16"))
            assert not where(problem, known_hardware("hip:gfx942"))
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**{name: lambda *tensors: calls.append(tensors)}))
    DeepGemm(SimpleNamespace(dry=False))("a", "scales of a", "b", "scales of b", "out")  # type: ignore[arg-type]
    assert calls == [(("a", "scales of a"), ("b", "scales of b"), "out")]


@pytest.mark.parametrize("operator", [AllGatherGemm, GemmReduceScatter])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scales": "none"}, "scales is 'none' with dtype e4m3; allowed are tensor, row, block: give one of these as --scales"),
        ({"dtype": "bf16"}, "scales is 'row' with dtype bf16; only e4m3 takes it: give --dtype e4m3 or leave --scales out"),
        ({"n": 100}, "n is 100 with dtype e4m3, scales row; it must be a multiple of 16: pad n to 112"),
        ({"scales": "block", "k": 144}, "k is 144 with dtype e4m3, scales block; it must be a multiple of 128: pad k to 256"),
        (
            {"operand": "e5m2", "scales": "block"},
            "operand is 'e5m2' with scales block, quantize none; it takes scales "
            "tensor or row, and no quantize: leave --operand out",
        ),
        ({"weight": "kn"}, "weight is 'kn' with dtype e4m3; allowed is nk: store B as [n, k]"),
        ({"quantize": "block"}, "scales is 'row' with quantize block; allowed is block: give --scales block"),
        (
            {"accumulate": "fast", "scales": "block"},
            "accumulate is 'fast' with scales block; allowed is exact, since sums end with every block: leave --accumulate out",
        ),
    ],
)
def test_refusals(operator: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        operator(**{"m": 64, "n": 96, "k": 256, "dtype": "e4m3", "scales": "row"} | change)
    assert str(refused.value) == said


def test_problems_of_other_types_have_the_keys_that_they_had() -> None:
    assert AllGatherGemm(512, 7168, 8192).key == "all-gather-gemm/m=512,n=7168,k=8192,dtype=bf16,shard=m,world_size=1"
    assert "scales" not in GemmReduceScatter(512, 7168, 8192).to_dict()
