"""Sizes between tuned ones: no answer is expected to be slower than BSP by more than 2 %, and searches have seeds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem, ceil_div
from autotax.db.index import Index, IndexedWinner, bucket
from autotax.db.lookup import LEAST_EXPECTED, answer
from autotax.db.records import Place
from autotax.db.shipped import Source
from autotax.operators import of
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.operators.registry import variant_digest
from autotax.software import environment
from autotax.spaces import space_for
from tests.tuner.shared import H200

HERE = Place(H200, environment("cuda"), Conditions.usual(True))
ENDS = (1, 16, 64, 96, 256, 512, 1024, 4096, 16384)
STEPS = (*range(1, 130, 7), *range(130, 1100, 43), *range(1100, 16385, 401))
GEMMS = [
    AllGatherGemm(512, 7168, 8192, world_size=2),
    GemmReduceScatter(512, 8192, 2560, world_size=2),
    GemmReduceScatter(512, 8192, 7168, output="replicated", world_size=4),
]


def high(problem: Problem) -> Config:
    """A config whose tiles have many rows, so that few rows in a shard waste most of it."""
    space = space_for(problem, H200)
    config = Config.of("push", space.default("push").values | {"block_m": 128, "splits": 1})
    return config if config in space else space.default("push")


def winner(problem: Problem, config: Config, speedup: float) -> IndexedWinner:
    digest = variant_digest(problem.op, config.variant)
    return IndexedWinner(problem.key, HERE, digest, json.dumps(config.to_dict()), speedup, speedup, speedup, False, 1)


def winners(problem: Problem, speedup: float) -> Source:
    """Winners of some sizes, as if each was `speedup` times as fast as BSP."""
    sized = [replace(problem, m=m) for m in ENDS]  # type: ignore[call-arg]
    return Source(Index([winner(each, high(each), speedup) for each in sized]))


@pytest.mark.parametrize("problem", GEMMS, ids=lambda problem: f"{problem.op} {problem.brief()}")
@pytest.mark.parametrize("speedup", [1.0, 1.05, 1.5])
def test_an_answer_is_never_expected_to_be_slower_than_bsp(problem: Problem, speedup: float) -> None:
    source, matches = winners(problem, speedup), Counter[str]()
    for m in sorted({*STEPS, *ENDS}):
        sized = replace(problem, m=m)  # type: ignore[call-arg]
        found = answer(sized, HERE, [source], allow_stale=False)
        matches[found.match] += 1
        end = bucket(m)[1]
        if m in ENDS:
            assert found.match == "exact"
        elif end not in ENDS:
            assert found.match == "fallback", m
        else:
            tile = found["block_m"] if found.match == "nearest" else high(replace(problem, m=end))["block_m"]  # type: ignore[call-arg]
            ours, bsp = (us(problem, m, each) / us(problem, end, each) for each in (tile * problem.world_size, 128))
            assert (found.match == "nearest") == (speedup * bsp / ours >= LEAST_EXPECTED), m
    assert matches["exact"] == len(ENDS)
    assert matches["nearest"], "sizes near a tuned one take its winner"


def us(problem: Problem, rows: int, tile: int) -> float:
    """The operator's roofline for whole tiles."""
    return of(problem).roofline_us(replace(problem, m=ceil_div(rows, tile) * tile))  # type: ignore[call-arg]


def test_padding_that_eats_the_speedup_is_left_to_bsp() -> None:
    """1030 rows of two ranks are 515 in a shard: five tiles of 128, the fifth with three rows. BSP has nine tiles."""
    problem, end = (replace(GEMMS[0], m=m) for m in (1030, 1536))
    for speedup, match in ((1.05, "fallback"), (1.2, "nearest")):
        found = answer(problem, HERE, [Source(Index([winner(end, high(end), speedup)]))], allow_stale=False)
        assert found.match == match
        assert (match == "nearest") != ("is expected to be 0.95x as fast as BSP here" in found.reason)


@pytest.mark.parametrize("m", [*range(64, 257, 32), 511, 3000])
@pytest.mark.parametrize("problem", GEMMS[1:], ids=lambda problem: problem.brief())
def test_the_first_trials_try_several_seeds_of_every_variant(problem: Problem, m: int) -> None:
    space = space_for(replace(problem, m=m), H200)  # type: ignore[call-arg]
    first = Counter(seed.variant for seed in space.seeds()[:30])
    for name, variant in space.variants.items():
        assert first[name] >= min(2, len({seed for seed in variant.seeds if seed in space})), name
