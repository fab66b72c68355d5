"""Decode merge beyond what every variant must do: log-sum-exps, late ranks, fewer tokens between more, missing ranks."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.hardware import detect
from autotax.heap import World
from autotax.operators.problems import DecodeMerge
from autotax.operators.registry import of
from autotax.operators.verification import TOLERANCE, Calls, Expected, make_inputs, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance
from tests.volume import volume

WORLD = 3
SCATTERED = DecodeMerge(5, 12, 32, "bf16", WORLD, "head_scatter", "2")
REPLICATED = DecodeMerge(5, 4, 32, "fp16", WORLD, "replicated", "e")
FLOATS = DecodeMerge(5, 3, 9, "fp32", WORLD, "head_scatter", "e")
VARIANTS = ("bsp", "gather", "fine_grained", "words", "compact")
QUICK = (("head_scatter", "compact"),)
CASES = [
    pytest.param(problem, variant, marks=[] if (problem.output, variant) in QUICK else pytest.mark.volume)
    for problem in (SCATTERED, REPLICATED)
    for variant in VARIANTS
] + [pytest.param(FLOATS, variant, marks=pytest.mark.volume) for variant in VARIANTS[:-1]]
PATIENCE = 600
"""Polls before a wait gives up: peers may take their time to begin."""
TOKENS = (5, 5, 1, 4, 1, 2, 1, 1, 1, 1, 5, 3, 5)
"""Query tokens of each call. At least eight calls lie between two that use the last rows: a word's tag has three bits."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as three:
        yield three


def config_of(problem: DecodeMerge, variant: str, **way: Value) -> Config:
    """A config with two rows a program where there are as many, and several parts and senders."""
    space = space_for(problem, detect("cpu"))
    usual = space.default(variant).values
    rows = 2 if 2 in space.variants[variant].parameters["rows"] else 1
    asked: dict[str, Value] = {"rows": rows, "senders": 2} | way
    config = Config.of(variant, usual | {name: value for name, value in asked.items() if name in usual})
    assert config in space, space.why_not(config)
    return config


def log_sum_exps(problem: DecodeMerge, seed: int, world: World) -> torch.Tensor:
    """The right merged LSE of a rank, float64."""
    first = world.rank * problem.out_heads if problem.output == "head_scatter" else 0
    calls = Calls(problem, seed, world.device)
    lse = torch.stack([call.tensors[1][:, first : first + problem.out_heads].double() for call in calls])
    natural = math.log(2.0) if problem.base == "2" else 1.0
    return torch.logsumexp(torch.where(lse.isfinite(), lse * natural, -math.inf), 0) / natural


def mixed(world: World, problem: DecodeMerge, config: Config, tokens: tuple[int, ...]) -> tuple[float, float, list[str]]:
    """Calls of so many tokens each, ranks late by other times: the worst error of O, that of LSE in units of its last place or
    of 1e-5, and digests of results of the first inputs.
    """
    context, kernel = conformance.ready(world, problem, config)
    late = random.Random(world.rank)
    worst, off, bits = 0.0, 0.0, []
    for number, some in enumerate(tokens):
        case = replace(problem, batch=some)
        seed = number if some < problem.batch else number % 2
        call = make_inputs(case, seed, world.rank, world.device)
        call.poison()
        call.tensors[2].fill_(math.nan)
        time.sleep(late.uniform(0, 0.01))
        fitted = kernel.fitted(case)
        assert fitted is not None
        fitted(*call.tensors, call.out)
        assert kernel.failure() is None, kernel.failure()
        ((right, spread),) = of(case).right(case, Calls(case, seed, world.device), world.rank)
        worst = max(worst, relative_error(call.out, Expected.of(right, spread, call.out.dtype)))
        lse, wanted = call.tensors[2].double(), log_sum_exps(case, seed, world)
        some_there = wanted.isfinite()
        assert torch.equal(lse[~some_there], wanted[~some_there]), "rows that are empty everywhere are -inf"
        difference = (lse - wanted).abs() / (1e-5 + 2**-21 * wanted.abs())
        off = max([off, *difference[some_there].tolist()])
        if seed == 0 and some == problem.batch:
            bits.append(call.out.nan_to_num(7.0).float().view(-1).numpy().tobytes().hex()[:4000])
    context.heap.close()
    return worst, off, bits


@pytest.mark.volume
@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_calls_of_fewer_tokens_may_come_between_others_whoever_is_late(ranks: Ranks, problem: DecodeMerge, variant: str) -> None:
    results = ranks.run(mixed, problem, config_of(problem, variant), TOKENS)
    for worst, off, bits in results:
        assert worst <= TOLERANCE[problem.dtype]
        assert off <= 1.0
        assert len(bits) > 1 and len(set(bits)) == 1, "equal inputs give equal bits"
    if problem.output == "replicated":
        assert len({bits[0] for _, _, bits in results}) == 1, "from rank to rank"


@pytest.mark.parametrize("variant", ["words", *volume("fine_grained", "gather", "compact")])
def test_a_rank_that_never_calls_is_named_by_all_others(ranks: Ranks, variant: str) -> None:
    missing = 1
    said = ranks.run(conformance.note_without, SCATTERED, config_of(SCATTERED, variant), missing, PATIENCE)
    for rank, line in enumerate(said):
        if rank != missing:
            assert re.match(f"rank {rank} waited for flag .* of rank {missing}:", str(line))


def masked(world: World, problem: DecodeMerge, config: Config, sequences: int) -> list[bool]:
    """Whether `seq_lens` of each rank give the same bits as -inf in its LSE, call after call."""
    context, kernel = conformance.ready(world, problem, config)
    same = []
    for seed in (0, 2, 4):
        o, lse, merged = make_inputs(problem, seed, world.rank, world.device).tensors
        drawn = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, problem.batch, (sequences + 1,), generator=drawn).sort().values.to(torch.int32)
        here = torch.Generator().manual_seed(seed + 100 * world.rank)
        lens = torch.randint(0, 2, (sequences,), generator=here).to(torch.int32)
        starts[0] = 0
        masked_lse = lse.clone()
        for token in range(problem.batch):
            mine = [i for i in range(sequences) if starts[i] <= token < starts[i + 1]]
            if not mine or lens[mine[0]] == 0:
                masked_lse[token] = -math.inf
        outs = []
        for given, held in ((masked_lse, None), (lse, (lens, starts))):
            out = torch.full((problem.batch, problem.out_heads, problem.head_dim), math.nan, dtype=o.dtype)
            merged.fill_(math.nan)
            kernel(o, given, merged, out, held)
            outs.append((out, merged.clone()))
        assert kernel.failure() is None, kernel.failure()
        same.append(all(torch.equal(one, two) for one, two in zip(*outs, strict=True)))
    context.heap.close()
    return same


@pytest.mark.parametrize(
    "variant", ["words", *volume("fine_grained", "gather", "bsp", "compact")]
)
def test_sequences_that_are_not_here_have_no_weight(ranks: Ranks, variant: str) -> None:
    problem, sequences = (SCATTERED, 3) if variant != "gather" else (REPLICATED, 130)
    assert ranks.run(masked, problem, config_of(problem, variant), sequences) == [[True] * 3] * WORLD


def outlier(world: World, config: Config) -> tuple[float, float, float]:
    """A channel 2^20 times as large as others: the greatest relative error of the others, its own, and of a head beside it."""
    problem = DecodeMerge(1, 2, 32, "bf16", WORLD)
    _, kernel = conformance.ready(world, problem, config)
    o = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(5)).sign().mul_(1.5).bfloat16()
    o[0, 0, 7] = 2.0**20
    lse, merged, out = torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, 32).bfloat16()
    kernel(o, lse, merged, out)
    off = ((out.float() - o.float()) / o.float()).abs()
    others = torch.arange(32) != 7
    return float(off[0, 0, others].max()), float(off[0, 0, 7]), float(off[0, 1].max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_outlier_costs_its_neighbours_no_more_than_is_promised(ranks: Ranks, variant: str) -> None:
    """Equal results merge into themselves; what travels as bf16 is exact, and 15 bits are within 2^-10."""
    space = space_for(DecodeMerge(1, 2, 32, "bf16", WORLD), detect("cpu"))
    for beside, own, other in ranks.run(outlier, space.default(variant)):
        # bf16 has 8 bits: an error within 2^-10 rounds to the same number or to its neighbour.
        assert beside <= (2.0**-7 if variant == "compact" else 0.0)
        assert own == other == 0.0


@pytest.mark.parametrize("problem", [SCATTERED, REPLICATED], ids=str)
def test_the_way_of_engines_that_it_is_compared_with_is_right_too(ranks: Ranks, problem: DecodeMerge) -> None:
    for errors in ranks.run(conformance.errors_of, problem, Config("gather_reduce"), 2):
        assert max(errors) <= TOLERANCE[problem.dtype]


def test_four_ranks_merge_what_two_heads_of_each_have() -> None:
    problem = DecodeMerge(2, 8, 64, "bf16", 4, "head_scatter")
    with Ranks(4) as four:
        for variant in ("fine_grained", "compact"):
            config = config_of(problem, variant, parts=2)
            for errors in four.run(conformance.errors_of, problem, config, 2):
                assert max(errors) <= TOLERANCE["bf16"], config
