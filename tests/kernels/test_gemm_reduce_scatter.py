"""GEMM + Reduce-Scatter and GEMM + All-Reduce beyond what every variant must do: equal bits, fewer rows, missing ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.operators import registry
from autotax.operators.problems import GemmReduceScatter
from autotax.operators.verification import TOLERANCE, Calls, make_inputs, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance

WORLD = 3
SCATTERED = GemmReduceScatter(40, 76, 300, "bf16", "scattered", WORLD)
REPLICATED = GemmReduceScatter(40, 70, 300, "fp32", "replicated", WORLD, "kn")
FLAGS: dict[str, Value] = {"block_m": 16, "block_n": 32, "flag_tiles": 2}
WAYS: list[tuple[str, dict[str, Value]]] = [
    ("push", {**FLAGS, "signals": "late", "adders": 0}),
    ("push", {**FLAGS, "signals": "at_once", "adders": 2, "splits": 2}),
    ("pull_reduce", {**FLAGS, "signals": "late", "adders": 2}),
    ("words", {"block_m": 16, "block_n": 32}),
    ("words", {"block_m": 32, "block_n": 32, "splits": 2, "shots": "two"}),
    ("two_kernel_words", {"words": "blank"}),
    ("two_kernel_words", {"words": "epoch", "shots": "two"}),
    ("two_kernel_words", {"words": "blank", "shots": "two"}),
    ("decomposed", {"products": "halves", "sender": "engine", "comm": 1}),
    ("decomposed", {"products": "one", "sender": "kernel", "comm": 2}),
    ("decomposed", {"products": "each", "sender": "product", "comm": 1}),
]
PATIENCE = 5000
"""Polls before a wait gives up: peers may take their time to begin."""
LOOKS = 1000
"""Polls for words before a wait gives up. The interpreter takes milliseconds for a poll of a tile of words."""
CASES = [(problem, name, way) for problem in (SCATTERED, REPLICATED) for name, way in WAYS]


def _outputs_of(problem: GemmReduceScatter, variant: str, **_: object) -> dict[str, object]:
    """Selects flags for one output and words for the other."""
    mine = {("scattered", "push"), ("replicated", "words")}
    return {"case": (problem.output, variant) if (problem.output, variant) in mine else None}


def _protocol_of(variant: str, **_: object) -> dict[str, object]:
    return {"words": "words" in variant}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as three:
        yield three


def config_of(problem: GemmReduceScatter, variant: str, way: dict[str, Value]) -> Config:
    space = space_for(problem, detect("cpu"))
    usual = space.default(variant).values
    if way.get("shots") == "two" and problem.output == "scattered":
        way = way | {"shots": "one"}
    config = Config.of(variant, usual | way)
    assert config in space, space.why_not(config)
    return config


@pytest.mark.sampled(by=_outputs_of)
@pytest.mark.parametrize(("problem", "variant", "way"), CASES, ids=str)
def test_equal_inputs_give_equal_bits_whoever_is_late(
    ranks: Ranks, problem: GemmReduceScatter, variant: str, way: dict[str, Value]
) -> None:
    bits = ranks.run(conformance.bits_of, problem, config_of(problem, variant, way), 3)
    assert all(len(set(digests)) == 1 for digests in bits), "from call to call"
    if problem.output == "replicated":
        assert len({digests[0] for digests in bits}) == 1, "from rank to rank"


@pytest.mark.sampled(by=_protocol_of)
@pytest.mark.parametrize(("problem", "variant", "way"), CASES, ids=str)
def test_calls_of_fewer_rows_may_come_between_others(
    ranks: Ranks, problem: GemmReduceScatter, variant: str, way: dict[str, Value]
) -> None:
    smaller = [replace(problem, m=m) for m in (40, 7, 1, 33, 40, 2, 18)]
    for errors in ranks.run(conformance.errors_of_sizes, problem, config_of(problem, variant, way), smaller):
        assert max(errors) <= TOLERANCE[problem.dtype]


def _spreads_nan() -> bool:
    """Whether torch's product carries the NaN of one row into another, as that of torch 2.10 and 2.11 does on CPUs in bf16."""
    a, b = torch.ones(40, 300, dtype=torch.bfloat16), torch.ones(70, 300, dtype=torch.bfloat16)
    a[3, 5] = torch.nan
    return int((a @ b.t()).isnan().any(1).sum()) > 1


RIGHT_PRODUCT = pytest.mark.skipif(_spreads_nan(), reason="torch's own product of bf16 on CPUs carries a NaN into another row")


@RIGHT_PRODUCT
@pytest.mark.parametrize("problem", [SCATTERED, REPLICATED], ids=str)
def test_the_baseline_takes_fewer_rows_too(ranks: Ranks, problem: GemmReduceScatter) -> None:
    smaller = [replace(problem, m=m) for m in (40, 7, 1, 40)]
    for errors in ranks.run(conformance.errors_of_sizes, problem, Config("bsp"), smaller):
        assert max(errors) <= TOLERANCE[problem.dtype]


@pytest.mark.sampled(by=lambda variant, **_: {} if "words" in variant else {"flags": True})  # words give up in other files too
@pytest.mark.parametrize(("problem", "variant", "way"), CASES, ids=str)
def test_a_rank_that_never_calls_is_named_by_all_others(
    ranks: Ranks, problem: GemmReduceScatter, variant: str, way: dict[str, Value]
) -> None:
    missing, patience = 1, LOOKS if "words" in variant else PATIENCE
    said = ranks.run(conformance.note_without, problem, config_of(problem, variant, way), missing, patience)
    for rank, line in enumerate(said):
        if rank != missing:
            assert re.match(f"rank {rank} waited for flag .* of rank {missing}:", str(line))


def errors_with_addends(world: World, problem: GemmReduceScatter, config: Config) -> tuple[list[float], str]:
    """Relative errors of calls with bias, with residual, with both, of fewer rows, and with none; and the bits of the second."""
    context, kernel = conformance.ready(world, problem, config)
    errors, digest = [], ""
    calls = [(40, "bias"), (40, "residual"), (7, "bias and residual"), (40, "")]
    for seed, (m, which) in enumerate(calls):
        case = replace(problem, m=m)
        with_bias, with_residual = "bias" in which, "residual" in which
        call = make_inputs(case, seed, world.rank, world.device)
        call.poison()
        own = world.rank if case.output == "scattered" else 0
        drawn = torch.Generator().manual_seed(100 * seed + own)
        bias = torch.randn(case.n, generator=torch.Generator().manual_seed(seed)).to(call.out.dtype) * 10
        residual = torch.randn(call.out.shape, generator=drawn).to(call.out.dtype) * 10
        fitted = kernel.fitted(case)
        assert fitted is not None
        fitted(*call.tensors, call.out, bias if with_bias else None, residual if with_residual else None)
        assert fitted.failure() is None, fitted.failure()
        ((right, _),) = registry.of(case).right(case, Calls(case, seed, world.device), world.rank)
        there = case.m if case.output == "replicated" else max(0, min(case.shard_rows, case.m - world.rank * case.shard_rows))
        right[:there] += bias.float() * with_bias + residual[:there].float() * with_residual
        assert not call.out[there:].any(), "padding"
        errors.append(relative_error(call.out, right))
        digest = hashlib.sha256(call.out.float().numpy().tobytes()).hexdigest() if which == "residual" else digest
    context.heap.close()
    return errors, digest


ADDING = [pytest.param("bsp", {}, marks=RIGHT_PRODUCT), *WAYS[1:6], WAYS[-1]]


@pytest.mark.sampled(by=_outputs_of)
@pytest.mark.parametrize("problem", [SCATTERED, REPLICATED], ids=str)
@pytest.mark.parametrize(("variant", "way"), ADDING, ids=str)
def test_bias_and_residual_are_added_where_the_sum_is_stored(
    ranks: Ranks, problem: GemmReduceScatter, variant: str, way: dict[str, Value]
) -> None:
    results = ranks.run(errors_with_addends, problem, config_of(problem, variant, way))
    for errors, _ in results:
        # The collective library's sum is rounded before.
        assert max(errors) <= TOLERANCE[problem.dtype] * (3 if variant == "bsp" else 1)
    if problem.output == "replicated" and variant != "bsp":
        assert len({bits for _, bits in results}) == 1, "equal residuals, equal bits"


def test_partial_sums_of_16_bits_cost_no_more_than_the_output_does(ranks: Ranks) -> None:
    """The payload's rounding stays within the tolerance; float32 payloads leave the output's rounding alone."""
    problem = GemmReduceScatter(48, 64, 512, "bf16", "scattered", WORLD)
    errors = {}
    for payload in ("bf16", "fp32"):
        config = config_of(problem, "push", {"payload": payload})
        errors[payload] = max(max(deviations) for deviations in ranks.run(conformance.errors_of, problem, config, 2))
    assert errors["fp32"] < errors["bf16"] <= TOLERANCE["bf16"]
