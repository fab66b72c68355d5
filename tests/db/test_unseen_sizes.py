"""Sizes between tuned ones: no answer is expected to be slower than BSP by more than 2 %, and searches have seeds."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem, ceil_div
from autotax.db import shipped
from autotax.db.answers import LEAST_EXPECTED, Answer, answer
from autotax.db.index import Index, IndexedWinner, bucket, bucket_key, family_key
from autotax.db.records import Place, WinnerRecord, same_kernel
from autotax.db.reproof import serving
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


def winner(problem: Problem, config: Config, speedup: float, us: float = math.nan, place: Place = HERE) -> IndexedWinner:
    digest, text = variant_digest(problem.op, config.variant), json.dumps(config.to_dict())
    return IndexedWinner(problem.key, place, digest, text, speedup, speedup, speedup, False, 1, us)


def winners(problem: Problem, speedup: float) -> Source:
    """Winners of some sizes, as if each was `speedup` times as fast as BSP."""
    sized = [replace(problem, m=m) for m in ENDS]  # type: ignore[call-arg]
    return Source(Index([winner(end, high(end), speedup) for end in sized]))


@pytest.mark.parametrize("problem", GEMMS, ids=lambda problem: f"{problem.op} {problem.brief()}")
@pytest.mark.parametrize("speedup", [1.0, 1.05, 1.5])
def test_an_answer_is_never_expected_to_be_slower_than_bsp(problem: Problem, speedup: float) -> None:
    source, matches = winners(problem, speedup), Counter[str]()
    for m in sorted({*STEPS, *ENDS}):
        sized = replace(problem, m=m)  # type: ignore[call-arg]
        reply = answer(sized, HERE, [source], allow_stale=False)
        matches[reply.match] += 1
        end = bucket(m)[1]
        if m in ENDS:
            assert reply.match == "exact"
        elif end not in ENDS:
            assert reply.match == "fallback", m
        else:
            tile = reply["block_m"] if reply.match == "nearest" else high(replace(problem, m=end))["block_m"]  # type: ignore[call-arg]
            ours, bsp = (us(problem, m, block) / us(problem, end, block) for block in (tile * problem.world_size, 128))
            assert (reply.match == "nearest") == (speedup * bsp / ours >= LEAST_EXPECTED), m
    assert matches["exact"] == len(ENDS)
    assert matches["nearest"], "sizes near a tuned one take its winner"


def us(problem: Problem, rows: int, tile: int) -> float:
    """The operator's roofline for whole tiles."""
    return of(problem).roofline_us(replace(problem, m=ceil_div(rows, tile) * tile))  # type: ignore[call-arg]


def test_padding_that_eats_the_speedup_is_left_to_bsp() -> None:
    """1030 rows of two ranks are 515 in a shard: five tiles of 128, the fifth with three rows. BSP has nine tiles."""
    problem, end = (replace(GEMMS[0], m=m) for m in (1030, 1536))
    for speedup, match in ((1.05, "fallback"), (1.2, "nearest")):
        reply = answer(problem, HERE, [Source(Index([winner(end, high(end), speedup)]))], allow_stale=False)
        assert reply.match == match
        assert (match == "nearest") != ("is expected to be 0.95x as fast as BSP here" in reply.reason)


def test_exact_sums_take_the_place_of_fast_ones_where_they_stay_faster_than_bsp() -> None:
    """BSP with fast sums takes 0.9 of the time of BSP with exact ones, at least; for few rows exact products are the fastest."""
    exact = AllGatherGemm(2048, 25600, 5120, "e4m3", "m", 2, scales="row")
    fast, smaller = replace(exact, accumulate="fast"), replace(exact, m=1664, accumulate="fast")
    ours, theirs = (space_for(problem, H200).default("scaled_specialized") for problem in (exact, fast))
    for speedup, match in ((1.07, "fallback"), (1.1, "nearest")):
        known = winner(exact, ours, speedup)
        reply = answer(fast, HERE, [Source(Index([known]))], allow_stale=False)
        assert reply.match == match
        assert (match == "nearest") != ("is expected to be 0.96x as fast as BSP here" in reply.reason)
    assert (reply, reply.from_problem) == (ours, exact.key) and f"that of a stricter problem, {exact.key}" in reply.reason
    assert answer(smaller, HERE, [Source(Index([winner(exact, ours, 1.5)]))], allow_stale=False).from_problem == exact.key
    sources = [Source(Index([known])), Source(Index([winner(fast, theirs, 1.02)]))]
    assert answer(fast, HERE, sources, allow_stale=False).from_problem == fast.key, "a winner of the problem itself comes first"
    assert answer(exact, HERE, sources[1:], allow_stale=False).match == "fallback", "fast sums serve no exact problem"
    few = replace(exact, m=16)
    known = winner(few, space_for(few, H200).default("scaled_push_words"), 1.0)
    assert answer(replace(few, accumulate="fast"), HERE, [Source(Index([known]))], allow_stale=False).from_problem == few.key
    assert list(serving([fast, exact])) == [fast, exact, exact], "a stale winner of exact sums is proven again for fast ones"


@pytest.mark.parametrize("m", [*range(64, 257, 32), 511, 3000])
@pytest.mark.parametrize("problem", GEMMS[1:], ids=lambda problem: problem.brief())
def test_the_first_trials_try_several_seeds_of_every_variant(problem: Problem, m: int) -> None:
    space = space_for(replace(problem, m=m), H200)  # type: ignore[call-arg]
    first = Counter(seed.variant for seed in space.seeds()[:30])
    for name, variant in space.variants.items():
        assert first[name] >= min(2, len({seed for seed in variant.seeds if seed in space})), name


def between(m: int, *known: IndexedWinner) -> Answer:
    return answer(replace(GEMMS[2], m=m), HERE, [Source(Index(known))], allow_stale=False)  # type: ignore[type-var]


def test_a_winner_of_more_rows_serves_where_bsp_takes_longer_for_fewer_already() -> None:
    few, many = (replace(GEMMS[2], m=m) for m in (4, 64))  # type: ignore[type-var]
    own, config = (space_for(problem, H200).default("words") for problem in (few, many))
    less, enough = winner(few, own, 1.5, 20.0), winner(many, config, 1.1, 29.0)  # BSP takes 30 us for 4 rows
    reply = between(40, less, enough)
    assert (reply, reply.match, reply.from_problem) == (config, "nearest", many.key)
    assert "tuned for m=64, where it is 1.03x faster than BSP for m=4" in reply.reason
    assert between(4, less, enough).from_problem == few.key and between(64, less, enough).from_problem == many.key
    assert "does not fit: block_m is 64; allowed are 16, 32" in between(24, less, enough).reason
    assert between(40, less, winner(many, config, 1.1, 29.5)).match == "fallback", "1.017x is too little"
    assert between(40, enough).match == between(40, less).match == between(96, less, enough).match == "fallback"
    in_graphs = replace(HERE, conditions=replace(HERE.conditions, mode="graph"))
    assert between(40, less, winner(many, config, 1.1, 29.0, in_graphs)).match == "fallback", "times of two kinds"
    assert between(40, less, winner(many, space_for(many, H200).default("bsp"), 1.0, 25.0)).match == "fallback"
    assert between(40, winner(few, own, 1.5), enough).match == "fallback", "its time is not known"


def test_no_winner_that_ships_contradicts_those_of_greater_and_smaller_sizes() -> None:
    """Without a winner of its own a problem takes that of more rows, whose time is less than that measured of BSP here."""
    alike: dict[tuple[str, Place], list[WinnerRecord]] = {}
    for known in shipped.winners():
        if len(known.problem.varying()) == 1 and same_kernel(known):
            alike.setdefault((family_key(known.problem.key), known.place), []).append(known)
    served = 0
    for (_, place), family in alike.items():
        times = {known.problem.key: known.latency_us for known in family}
        for known in family:
            problem, of_bsp = known.problem, known.latency_us * known.speedup
            others = [other for other in family if bucket_key(other.problem.key) != bucket_key(problem.key)]
            index = Index([winner(other.problem, other.config, other.interval_low, other.latency_us, place) for other in others])
            reply = answer(problem, place, [Source(index)], allow_stale=False)
            if reply.from_problem:
                served += 1
                assert of_bsp / times[reply.from_problem] >= LEAST_EXPECTED, (problem, reply)
    assert served > 40
