"""Results that verification accepts or refuses, element by element: outliers, magnitudes, infinities and NaNs."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from autotax.core.conditions import ON_CPU
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.kernels.context import DTYPES
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather
from autotax.operators.verification import TOLERANCE, Expected, farthest, make_inputs, reference, relative_error, tolerance
from autotax.runner.benchmark import SOAKED, VERIFIED, Bench, InputCache, WrongResult
from autotax.runner.measurement import Candidate, Effort

CPU = torch.device("cpu")
DECODE = FlashDecode(4, 16, 4, 64, 600, "bf16", 2)
PROBLEMS: list[Problem] = [
    DECODE,
    FlashDecode(1, 1, 1, 128, 3000, "fp16", 2),
    FlashDecode(2, 4, 2, 16, 75, "fp16", 2, "head_scatter", 16),
    FlashDecode(3, 2, 1, 9, 40, "fp32", 2),
    AllGatherGemm(64, 48, 256, "bf16", "m", 2),
    AllGatherGemm(1, 40, 2048, "bf16", "m", 2),
    AllGatherGemm(37, 45, 72, "fp16", "k", 2),
    AllGatherGemm(16, 16, 16384, "fp16", "m", 2),
    AllGatherGemm(48, 40, 32, "fp32", "m", 2),
]
OTHERS: list[Problem] = [
    GemmReduceScatter(64, 48, 128, "bf16", "scattered", 2),
    GemmReduceScatter(37, 45, 72, "fp16", "replicated", 2, "kn"),
    DecodeMerge(16, 8, 64, "bf16", 2),
    DecodeMerge(9, 4, 48, "fp16", 2, "head_scatter", "2"),
    HeadGather(5, 12, 20, "bf16", 2),
]
NORMS = [AllReduceNorm(9, 264, "bf16", 2), AllReduceNorm(9, 1040, "fp16", 2, "none")]


def test_outliers_are_among_what_is_verified_and_soaked() -> None:
    assert any(seed % 2 for seed in VERIFIED) and any(seed % 2 for seed in SOAKED[:-1])


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("problem", [*PROBLEMS, *OTHERS, *NORMS], ids=str)
def test_rounding_passes_and_five_times_the_tolerance_does_not(problem: Problem, seed: int) -> None:
    for rank in range(2):
        expected = reference(problem, seed, rank, CPU)
        right = expected.right.to(DTYPES[problem.dtype])
        allowed = TOLERANCE[problem.dtype]
        assert relative_error(right, expected) < 0.8 * allowed
        assert relative_error(expected.right * (1 + 5 * allowed), expected) > allowed


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("world", [4, 8])
def test_a_sum_that_is_rounded_after_each_addition_passes_and_one_without_a_rank_does_not(world: int, seed: int) -> None:
    problem = GemmReduceScatter(256, 512, 64, "bf16", "replicated", world)
    expected = reference(problem, seed, 0, CPU)
    operands = [make_inputs(problem, seed, rank, CPU).tensors for rank in range(world)]
    first, *others = ((a.float() @ b.float().t()).bfloat16() for a, b in operands)
    rounded = first.clone()
    for other in others:
        rounded += other
    error = relative_error(rounded, expected)
    assert 0.45 * tolerance(problem) < error < 0.55 * tolerance(problem)
    assert relative_error(rounded - first, expected) > 10 * tolerance(problem)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_odd_sets_have_outliers_of_all_kinds_that_the_type_can_hold(problem: Problem) -> None:
    every = [reference(problem, 1, rank, CPU) for rank in range(2)]
    right = torch.cat([expected.right.view(-1) for expected in every])
    assert right[right.isfinite()].abs().max() < torch.finfo(DTYPES[problem.dtype]).max / 1.5
    assert (right[right.isfinite()] != 0).any()
    if isinstance(problem, FlashDecode):
        v = make_inputs(problem, 1, 0, CPU).tensors[2].float().nan_to_num(0.0, 0.0, 0.0)
        heads = v if problem.page else v.transpose(1, 2)
        sizes = heads.reshape(-1, problem.kv_heads, problem.head_dim).abs().mean(0)
        assert (sizes.amax(1) > 500 * sizes.median(1).values).any(), "an outlier channel"
    if isinstance(problem, FlashDecode) or problem.m >= 8:
        assert right.isnan().any() and right.isinf().any()
        assert sum(len(expected.odd) for expected in every) < len(right) / 3, "most elements are held to a limit"


@pytest.mark.parametrize("problem", OTHERS, ids=str)
def test_odd_sets_of_other_operators_have_what_is_not_finite_and_what_is_far_from_one(problem: Problem) -> None:
    given = [make_inputs(problem, 1, rank, CPU).tensors[0].float() for rank in range(2)]
    every = torch.cat([reference(problem, 1, rank, CPU).right.view(-1) for rank in range(2)])
    assert every.isnan().any() and every.isinf().any()
    assert every.isfinite().sum() > len(every) / 2, "most elements are held to a limit"
    if not isinstance(problem, HeadGather):  # which copies, whatever it is
        sizes = torch.cat([tensor[tensor.isfinite()] for tensor in given]).abs()
        assert sizes.max() > (12 if problem.dtype == "fp16" else 1000) and (sizes[sizes > 0].min() < 1e-3)


def fixed_point(o: Tensor) -> Tensor:
    """Each row as integers of 15 bits with a common scale, a former payload of `compact`."""
    largest = o.abs().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), torch.where(largest > 1e-30, largest, 0.0), math.nan)
    steps = torch.where(largest > 0, 16383 / largest, torch.where(largest.isnan(), math.nan, 0.0))
    return (o * steps + 0.5).floor() * largest / 16383


def minifloat(o: Tensor) -> Tensor:
    """Each element rounded to nine bits of mantissa, as `compact` does now where nothing is far below its row's largest."""
    mantissa, exponent = torch.frexp(o)
    return torch.ldexp((mantissa * 1024).round() / 1024, exponent).where(o.isfinite(), o)


def finite_part(expected: Expected) -> Expected:
    """Replaces infinities and NaNs by zeros; the tolerance there does not matter."""
    kept = [tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (expected.right, expected.inverse)]
    return Expected(kept[0], kept[1], torch.empty(0, dtype=torch.int64), TOLERANCE["bf16"])


@pytest.mark.parametrize(
    ("lossy", "normal", "outliers", "odd"), [(fixed_point, True, False, False), (minifloat, True, True, True)]
)
def test_numbers_that_share_a_scale_fail_by_outliers_alone_and_by_infinities_alone(
    lossy: Callable[[Tensor], Tensor], normal: bool, outliers: bool, odd: bool
) -> None:
    limit = TOLERANCE["bf16"]
    normals, extremes = (reference(DECODE, seed, 0, CPU) for seed in VERIFIED)
    assert (relative_error(lossy(normals.right).bfloat16(), normals) <= limit) is normal
    finite = finite_part(extremes)
    assert (relative_error(lossy(finite.right).bfloat16(), finite) <= limit) is outliers
    only_odd = normals.right.clone()
    only_odd[0, 0, 3], only_odd[1, 2, 5] = math.inf, math.nan
    assert (relative_error(lossy(only_odd), Expected.of(only_odd, None, torch.bfloat16)) <= limit) is odd


Harm = Callable[[Tensor, Tensor], None]
"""A function that damages an output, given the spread of its elements."""


def _channel(out: Tensor, _: Tensor) -> None:
    out[:, 5] *= 1.05


def _row(out: Tensor, _: Tensor) -> None:
    out[7] *= 1.05


def _element(out: Tensor, spread: Tensor) -> None:
    out[9, 11] += 0.15 * spread[9, 11]


def _infinite(out: Tensor, _: Tensor) -> None:
    out[9, 11] = math.inf


def _sign_of_infinities(out: Tensor, _: Tensor) -> None:
    out[out.isinf()] *= -1


def _infinity_for_nan(out: Tensor, _: Tensor) -> None:
    out[out.isnan()] = math.inf


def _number_for_infinity(out: Tensor, _: Tensor) -> None:
    out[out.isinf()] = torch.finfo(torch.bfloat16).max


def _zeros_for_tiny(out: Tensor, _: Tensor) -> None:
    out[out.abs() < 1e-20] = 0.0


@pytest.mark.parametrize(
    "harm",
    [_channel, _row, _element, _infinite, _sign_of_infinities, _infinity_for_nan, _number_for_infinity, _zeros_for_tiny],
)
@pytest.mark.parametrize("problem", [DECODE, AllGatherGemm(64, 64, 256, "bf16", "m", 2)], ids=str)
def test_one_wrong_element_row_or_channel_is_seen(problem: Problem, harm: Harm) -> None:
    expected = reference(problem, 1, 0, CPU)
    out = expected.right.clone()
    harm(out.view(-1, out.shape[-1]), 1 / expected.inverse.view(-1, out.shape[-1]))
    assert not torch.equal(out.nan_to_num(7.0), expected.right.nan_to_num(7.0)), "there was something to harm"
    assert relative_error(out, expected) > TOLERANCE["bf16"]


@pytest.mark.parametrize("problem", NORMS, ids=str)
def test_odd_sums_have_outlier_rows_and_channels_and_what_is_not_finite(problem: AllReduceNorm) -> None:
    (expected,) = reference(problem, 1, 0, CPU).more
    assert expected.right.isnan().any() and expected.right.isinf().any()
    sizes = expected.right.nan_to_num(1.0, 1.0, 1.0).abs().clamp_min(1e-30).log2()
    for dim in (0, 1):
        assert sizes.median(dim).values.max() - sizes.median(dim).values.min() > 4


@pytest.mark.parametrize("quant", ["none", "tensor", "row", "block"])
def test_a_further_output_that_is_wrong_fails_a_trial_and_a_soak(quant: str) -> None:
    problem = AllReduceNorm(5, 256, "bf16", 2, quant=quant)
    inputs = InputCache(problem, 0, CPU, detect("cpu"))
    world = SimpleNamespace(rank=0, world=SimpleNamespace(synchronize=lambda: None), heap=SimpleNamespace(slab=torch.zeros(1)))
    bench = Bench(problem, Candidate(Config("bsp"), ON_CPU), world, inputs)  # type: ignore[arg-type]
    bench.operator = SimpleNamespace(failure=lambda: None)  # type: ignore[assignment]
    for seed in (0, 1):
        call, expected = inputs.get(seed), inputs.reference(seed)
        assert len(call.outputs) == 1 + len(expected.more) == 2 + (quant in ("row", "block"))
        for output, right in zip(call.outputs, (expected, *expected.more), strict=True):
            output.copy_(right.right)
        bench._check(seed, call.out)
        for output in call.outputs[1:]:
            kept = output.clone()
            for harm in (lambda flat: flat[-1].add_(1e4), lambda flat: flat[:1].fill_(math.nan), lambda flat: flat.mul_(1.06)):
                harm(output.view(-1))
                assert farthest(call.out, expected, call) > TOLERANCE[problem.out_dtype]
                with pytest.raises(WrongResult):
                    bench._check(seed, call.out)
                output.copy_(kept)
            call.poison()
            assert output.isnan().all()
            for written, right in zip(call.outputs, (expected, *expected.more), strict=True):
                written.copy_(right.right)


def test_every_reference_is_reported_before_it_is_computed() -> None:
    """The tuner kills ranks that are silent, and a reference of long attention takes a quarter of a minute."""
    inputs, stages = InputCache(AllReduceNorm(5, 256, "bf16", 2), 0, CPU, detect("cpu")), list[str]()
    for effort in (Effort(), Effort(soak=4), Effort(soak=4)):
        inputs.draw([Candidate(Config("bsp"), ON_CPU)], effort, stages.append)
    later = [seed for seed in SOAKED if seed not in VERIFIED]
    assert stages == [f"reference of input set {seed}" for seed in (*VERIFIED, *later)]


def test_zeros_are_asked_for_where_the_reference_is_zero() -> None:
    for dtype in DTYPES.values():
        nothing = torch.zeros(4, 8, dtype=dtype)
        assert relative_error(nothing, torch.zeros(4, 8)) == 0.0
        nothing[2, 3] = 1e-4
        assert relative_error(nothing, torch.zeros(4, 8)) == math.inf
