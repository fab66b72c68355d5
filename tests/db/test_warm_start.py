"""Earlier winners that the tuner tries before the seeds, and their order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db.index import IndexedWinner
from autotax.db.records import Place
from autotax.db.shipped import MOST, precedents
from autotax.operators.problems import AllGatherGemm, FlashDecode, GemmReduceScatter
from autotax.operators.registry import variant_digest
from autotax.spaces import space_for
from tests.db.conftest import ENVIRONMENT, HARDWARE, PROBLEM

HERE = Place(HARDWARE, ENVIRONMENT, Conditions())
DECODE = FlashDecode(8, 64, 8, 128, 8192, "bf16", 4)


def suggested(problem: Problem, winners: list[IndexedWinner], fits: Callable[[Config], bool] = lambda _: True) -> list[Config]:
    return precedents(problem, HERE, winners, lambda config: config if fits(config) else None)


def won(problem: Problem, number: int, low: float = 1.2, place: Place = HERE) -> IndexedWinner:
    """A winner with variant `push`, whose parameter holds `number`."""
    config, kernels = push(number), variant_digest(problem.op, "push")
    return IndexedWinner(problem.key, place, kernels, json.dumps(config.to_dict()), low + 0.05, low, low + 0.1, False, number)


def push(number: int) -> Config:
    return Config.of("push", comm=number)


def test_the_nearest_sizes_go_first_and_far_ones_are_left_out() -> None:
    changed = [{"m": 1024}, {}, {"m": 256}, {"m": 640}, {"m": 2048}, {"m": 4096}, {"m": 1024, "n": 3584, "k": 4096}]
    winners = [won(replace(PROBLEM, **sizes), number) for number, sizes in enumerate(changed, 1)]
    assert suggested(PROBLEM, winners) == [push(number) for number in (2, 4, 1, 3, 5)]


def test_of_a_problem_those_measured_in_a_place_like_this_go_first_then_the_better_proven() -> None:
    upgraded = replace(HERE, software=replace(ENVIRONMENT, triton="3.5.0"))
    moved = replace(upgraded, hardware=replace(HARDWARE, device="NVIDIA H100", memory_gib=80))
    winners = [won(PROBLEM, 1, place=moved), won(PROBLEM, 2, place=upgraded), won(PROBLEM, 3), won(PROBLEM, 4, low=1.3)]
    assert suggested(PROBLEM, winners) == [push(4), push(3), push(2), push(1)]
    assert suggested(PROBLEM, winners[::-1]) == suggested(PROBLEM, winners)


@pytest.mark.parametrize(
    "other",
    [
        won(replace(PROBLEM, dtype="fp16"), 1),
        won(replace(PROBLEM, shard="k"), 1),
        won(DECODE, 1),
        won(PROBLEM, 1, place=replace(HERE, hardware=replace(HARDWARE, backend="rocm"))),
        won(PROBLEM, 1, place=replace(HERE, hardware=replace(HARDWARE, backend="cpu"))),
    ],
    ids=["another dtype", "another shard", "another operator", "another vendor", "CPU ranks"],
)
def test_others_say_nothing(other: IndexedWinner) -> None:
    assert suggested(PROBLEM, [other]) == []


@pytest.mark.parametrize("changed", [{"output": "head_scatter"}, {"page": 16}])
def test_a_cache_in_pages_and_heads_that_are_scattered_are_other_problems(changed: dict[str, Any]) -> None:
    assert suggested(DECODE, [won(replace(DECODE, **changed), 1), won(replace(DECODE, batch=16), 2)]) == [push(2)]


def test_each_config_once_and_no_more_than_so_many() -> None:
    winners = [won(replace(PROBLEM, m=512 + 4 * number), number // 2) for number in range(4 * MOST)]
    last = push(2 * MOST - 1)
    assert suggested(PROBLEM, winners) == [push(number) for number in range(MOST)]
    assert suggested(PROBLEM, winners, [push(3), last].__contains__) == [push(3), last], "of those that fit"


def test_a_winner_that_is_older_than_a_parameter_has_its_former_value() -> None:
    problem = GemmReduceScatter(1024, 8192, 4096, world_size=2)
    space = space_for(problem, HARDWARE)
    adding = next(config for config in space.variants["push_specialized"].seeds if config["adds"] == "warps")
    older = Config.of(adding.variant, {name: value for name, value in adding.values.items() if name != "adds"})
    assert older not in space
    kernels, winners = variant_digest(problem.op, older.variant), []
    for place, config in enumerate((older, adding)):
        winners.append(IndexedWinner(problem.key, HERE, kernels, json.dumps(config.to_dict()), 1.3, 1.2, 1.4, False, place))
    assert precedents(problem, HERE, winners, space.admit) == [adding]


def test_more_ranks_are_another_size() -> None:
    doubled = AllGatherGemm(PROBLEM.m, PROBLEM.n, PROBLEM.k, world_size=8)
    assert suggested(PROBLEM, [won(doubled, 1), won(replace(PROBLEM, m=520), 2)]) == [push(2), push(1)]
