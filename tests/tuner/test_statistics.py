"""The statistics behind verdicts."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import runpy
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotax.tuner.finalists import MOST, estimate, median_interval, ratio, speedup, student

REPEATS = Path(__file__).parents[2] / "results" / "search" / "repeats.json.gz"


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=80))
def test_the_interval_lies_within_the_values_and_around_their_middle(values: list[float]) -> None:
    low, high = median_interval(values)
    assert min(values) <= low <= sorted(values)[len(values) // 2] <= high <= max(values)


@pytest.mark.parametrize("count", [8, 20, 50])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    source = random.Random(7)
    trials = 2000
    held = 0
    for _ in range(trials):
        low, high = median_interval([source.expovariate(1.0) for _ in range(count)])
        held += low <= 0.6931471805599453 <= high
    assert held / trials > 0.94


def test_few_values_give_their_whole_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_speedup_is_paired_so_common_noise_cancels() -> None:
    noise = random.Random(1)
    common = [noise.uniform(1, 3) for _ in range(40)]
    ratio, (low, high) = speedup([1.25 * c for c in common], common)
    assert ratio == pytest.approx(1.25) and low == pytest.approx(1.25) and high == pytest.approx(1.25)


def test_an_independent_job_lands_in_the_interval_of_two_about_as_often_as_it_says() -> None:
    """Recorded repeats of finalist rounds and comparisons, in runs of their own. One job in the old way held 36 %. An interval
    that holds everything would be no use, so its width has a limit too: 3.7 % each way, on average.
    """
    held: dict[str, list[float]] = defaultdict(list)
    wide: dict[str, list[float]] = defaultdict(list)
    for key, jobs in json.loads(gzip.decompress(REPEATS.read_bytes())).items():
        inside, operator = [], json.loads(key)[0].partition("/")[0]
        for some in itertools.combinations(range(min(len(jobs), 4)), 2):
            two = [jobs[i] for i in some]
            low, high = estimate(two, [[1.0] * len(job) for job in two]).another_job
            inside += [low <= statistics.median(job) <= high for i, job in enumerate(jobs) if i not in some]
            wide[operator].append(math.log(high / low) / 2)
        if inside:
            held[operator].append(statistics.mean(inside))
    assert len(held) == 2 and all(statistics.mean(shares) >= 0.90 for shares in held.values()), held
    assert all(0.02 < statistics.mean(widths) < 0.037 for widths in wide.values())


def test_a_later_comparison_lands_in_the_intervals_of_live_winners() -> None:
    """Uses the winners of 2 H100. Another command made the comparison after they were stored."""
    script = runpy.run_path(str(REPEATS.with_name("coverage.py")))
    intervals = [(script["interval"](jobs), median) for _, jobs, median, _ in script["live"]()]
    assert len(intervals) == 108 and sum(low <= median <= high for (low, high), median in intervals) >= 98
    assert sum(low <= median for (low, _), median in intervals) >= 101, "what is promised is kept more often than that"


def test_jobs_that_differ_widen_the_interval_and_more_jobs_narrow_it() -> None:
    def width(*ratios: float) -> float:
        jobs = [[100.0 * ratio * noise for noise in (0.999, 1.0, 1.001) * 10] for ratio in ratios]
        low, high = estimate(jobs, [[100.0] * 30] * len(jobs)).mean
        assert low < statistics.geometric_mean(ratios) < high
        return high / low

    assert width(1.2, 1.3) > width(1.249, 1.251) > width(1.249, 1.251, 1.249, 1.251)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (6, 2.447), (30, 2.042)])
def test_the_reach_of_students_distribution(freedom: int, quantile: float) -> None:
    assert student(0.95, freedom) == pytest.approx(quantile, abs=5e-4)


def test_differences_that_are_not_above_zero_widen_the_interval_and_raise_nothing() -> None:
    figures = [(3.0, 1.5), (1.0, 0.0), (1.0, -2.0), (-1.0, 2.0), (0.0, -1.0)]
    assert [ratio(*pair) for pair in figures] == [2.0, MOST, MOST, 1 / MOST, 1.0]
    clear = [[10.0, 11.0, 9.0, 10.0, 10.5] * 4] * 2
    gain = estimate(clear, [[5.0, 5.5, 4.5, 5.0, 5.2] * 4] * 2)
    assert 1.9 < gain.another_job[0] < 2.0 < gain.another_job[1] < 2.1
    lost = estimate(clear, [[-1.0, 6.0, 30.0, -4.0, 12.0] * 4] * 2)
    assert lost.another_job[0] < 1.0 < 10.0 < lost.another_job[1], "nothing is known of it"
    speed, (low, high) = speedup([1.0, 1.0, 1.0, 1.0], [0.5, -0.1, 0.5, 4.0])
    assert speed == 2.0 and (low, high) == (0.25, MOST)
