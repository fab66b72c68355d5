"""Sizes between tuned ones: no answer is expected to be slower than BSP by more than 2 %, and searches have seeds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem, ceil_div
from autotax.db import shipped
from autotax.db.answers import LEAST_ABOVE, LEAST_EXPECTED, Answer, _kept_share, answer
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
        if m in ENDS:
            assert reply.match == "exact"
            continue
        greater = [end for end in ENDS if m < end <= 2 * m]
        bounds = {end: LEAST_EXPECTED if end == bucket(m)[1] else LEAST_ABOVE for end in greater}
        served = {end for end, least in bounds.items() if expected(problem, m, end, speedup) >= least}
        assert (reply.match == "nearest") == bool(served), m
        assert not served or reply.from_problem in {replace(problem, m=end).key for end in served}, m  # type: ignore[call-arg]
    assert matches["exact"] == len(ENDS)
    assert matches["nearest"], "sizes near a tuned one take its winner"


def expected(problem: Problem, m: int, end: int, speedup: float) -> float:
    """The speed-up at m of a winner at `end`, by the roofline of whole tiles; 0 where its config does not fit."""
    config = high(replace(problem, m=end))  # type: ignore[call-arg]
    if of(problem).why_not(replace(problem, m=m), H200, config):  # type: ignore[call-arg]
        return 0.0
    ours, bsp = (us(problem, m, tile) / us(problem, end, tile) for tile in (config["block_m"] * problem.world_size, 128))
    return speedup * bsp / ours


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
    less, enough = winner(few, own, 1.5, 20.0), winner(many, config, 1.05, 29.0)  # BSP takes 30 us for 4 rows
    reply = between(40, less, enough)
    assert (reply, reply.match, reply.from_problem) == (config, "nearest", many.key)
    assert "tuned for m=64, where it is 1.03x faster than BSP for m=4" in reply.reason
    assert between(4, less, enough).from_problem == few.key and between(64, less, enough).from_problem == many.key
    assert "does not fit: block_m is 64; allowed are 16, 32" in between(24, less, enough).reason
    assert between(40, less, winner(many, config, 1.05, 29.5)).match == "fallback", "1.017x is too little"
    assert between(40, enough).match == between(40, less).match == between(96, less, enough).match == "fallback"
    in_graphs = replace(HERE, conditions=replace(HERE.conditions, mode="graph"))
    assert between(40, less, winner(many, config, 1.05, 29.0, in_graphs)).match == "fallback", "times of two kinds"
    assert between(40, less, winner(many, space_for(many, H200).default("bsp"), 1.0, 25.0)).match == "fallback"
    assert between(40, winner(few, own, 1.5), enough).match == "fallback", "its time is not known"


def test_no_winner_that_ships_contradicts_those_of_greater_and_smaller_sizes() -> None:
    """Without a winner of its own a problem takes that of more rows, whose time is less than that measured of BSP here; or one
    that is expected to be faster here. Then the problem's own winner is about as fast as expected, or faster.
    """
    by_times, kept = 0, []
    for known, place, others in left_out():
        index = Index([winner(other.problem, other.config, other.interval_low, other.latency_us, place) for other in others])
        reply = answer(known.problem, place, [Source(index)], allow_stale=False)
        if "the next greater size" in reply.reason:
            (other,) = (other for other in others if other.problem.key == reply.from_problem)
            (size,) = {name: getattr(other.problem, name) for name in known.problem.varying()}.items()
            kept.append(known.speedup / (other.interval_low * _kept_share(known.problem, dict([size]), other.config)))
        elif reply.from_problem:
            by_times += 1
            time = next(other.latency_us for other in others if other.problem.key == reply.from_problem)
            assert known.latency_us * known.speedup / time >= LEAST_EXPECTED, (known.problem, reply)
    assert by_times > 40 and len(kept) > 150
    assert min(kept) > 0.75 and sum(share < 0.9 for share in kept) / len(kept) < 0.05


def left_out() -> Iterator[tuple[WinnerRecord, Place, list[WinnerRecord]]]:
    """Each winner that ships, its place, and those of the same family there that are not in its bucket."""
    alike: dict[tuple[str, Place], list[WinnerRecord]] = {}
    for known in shipped.winners():
        if len(known.problem.varying()) == 1 and same_kernel(known):
            alike.setdefault((family_key(known.problem.key), known.place), []).append(known)
    for (_, place), family in alike.items():
        for known in family:
            yield known, place, [other for other in family if bucket_key(other.problem.key) != bucket_key(known.problem.key)]


@pytest.mark.parametrize(
    ("op", "dtype", "least"),
    [
        ("all-gather-gemm", "bf16", 0.9), ("all-gather-gemm", "e4m3", 0.6),
        ("gemm-reduce-scatter", "bf16", 0.9), ("gemm-reduce-scatter", "e4m3", 0.9),
    ],
)  # fmt: skip
def test_most_sizes_between_tuned_ones_are_served(op: str, dtype: str, least: float) -> None:
    """Of the numbers of rows between the least and the greatest size of a family that ships for two H200, six sizes or more."""
    families: dict[str, list[WinnerRecord]] = {}
    for known in shipped.winners():
        here = (known.hardware.device, known.hardware.count, known.conditions.mode) == ("NVIDIA H200", 2, "in-place")
        if here and (known.problem.op, known.problem.dtype) == (op, dtype) and same_kernel(known):
            families.setdefault(family_key(known.problem.key), []).append(known)
    served = rows = 0
    for family in families.values():
        sizes = [known.problem.m for known in family]  # type: ignore[attr-defined]
        source = Source(Index([winner(of.problem, of.config, of.interval_low, of.latency_us) for of in family]))
        end = min(sizes) if len(sizes) >= 6 else math.inf
        while end < max(sizes):
            first, end = bucket(int(end) + 1)
            problem = replace(family[0].problem, m=end)  # type: ignore[call-arg]
            rows += end - first + 1
            served += (end - first + 1) * (answer(problem, HERE, [source], allow_stale=False).match != "fallback")
    assert served / rows >= least
