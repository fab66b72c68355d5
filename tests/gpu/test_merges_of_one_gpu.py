"""Decode merge and head gather on ranks that share one GPU: their protocols can be proven without links."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from autotax.core.config import Config, Value
from autotax.core.problem import Problem
from autotax.operators.problems import DecodeMerge, HeadGather
from autotax.operators.verification import TOLERANCE
from autotax.spaces import space_for
from tests.gpu import ranks_of_one_gpu
from tests.spaces.drawing import drawn

pytestmark = pytest.mark.gpu

REPLAYS = 300
LONG = 10_000
PROBLEMS: list[Problem] = [
    DecodeMerge(16, 128, 512, "bf16", 4, "head_scatter"),
    DecodeMerge(5, 12, 80, "fp16", 3, "replicated", "2"),
    DecodeMerge(64, 64, 128, "bf16", 4, "replicated"),
    DecodeMerge(33, 16, 64, "fp32", 2, "head_scatter", "2"),
    HeadGather(16, 128, 576, "bf16", 4),
    HeadGather(7, 12, 79, "fp32", 3),
]
ONE_EACH: dict[str, Value] = {"per_processor": 1}
"""Waiting programs may occupy all processors. Kernels of another rank then found none: they may need another split of shared
memory and cache. So the programs of all ranks but one leave processors free.
"""
CASES = [(problem, variant) for problem in PROBLEMS for variant in ("gather", "fine_grained", "words", "compact", "push")]


def space(problem: Problem) -> Any:
    return space_for(problem, ranks_of_one_gpu.share_of(problem.world_size))


def default(problem: Problem, variant: str) -> Config:
    search_space = space(problem)
    if variant not in search_space.variants:
        pytest.skip(f"{problem.key} has no {variant}")
    config: Config = search_space.default(variant)
    return Config.of(variant, config.values | ONE_EACH) if "per_processor" in config.values else config


def run(problem: Problem, config: Config, replays: int = REPLAYS) -> None:
    worst, wrong = ranks_of_one_gpu.replay(problem, config, replays)
    assert worst <= TOLERANCE[problem.dtype]
    assert wrong == 0


@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_replays_a_graph_with_late_ranks_and_never_errs(problem: Problem, variant: str) -> None:
    run(problem, default(problem, variant))


@pytest.mark.full
@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_replays_it_ten_thousand_times(problem: Problem, variant: str) -> None:
    run(problem, default(problem, variant), LONG)


@pytest.mark.parametrize("name", "abcdef")
@pytest.mark.parametrize(("problem", "variant"), CASES[2:4] + CASES[7:9], ids=str)
def test_configs_drawn_at_random_never_err(problem: Problem, variant: str, name: str) -> None:
    default(problem, variant)
    run(problem, drawn(space(problem), variant, name))


@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_calls_of_fewer_tokens_may_come_between_others(problem: Any, variant: str) -> None:
    most: int = problem.batch
    smaller = [replace(problem, batch=max(1, batch)) for batch in (most, 1, most // 2, 1, 1, 1, 1, 1, 1, 1, most, most - 1)]
    assert ranks_of_one_gpu.mix_of(problem, default(problem, variant), smaller, 96) <= TOLERANCE[problem.dtype]


@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_a_rank_that_never_calls_is_named_by_all_others(problem: Problem, variant: str) -> None:
    for note in ranks_of_one_gpu.without(1, problem, default(problem, variant)):
        assert re.match(r"rank \d waited for flag .* of rank 1:", str(note))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("variant", ["words", "compact"])
def test_every_way_of_cutting_rows_never_errs(variant: str, rows: int, parts: int) -> None:
    problem = PROBLEMS[0]
    changes: dict[str, Value] = {"rows": rows, "parts": parts, "per_processor": 1, "num_warps": 4}
    config = Config.of(variant, changes)
    if why_not := space(problem).why_not(config):
        pytest.skip(why_not)
    run(problem, config)
