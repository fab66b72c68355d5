"""The statistics behind verdicts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotax.tuner.statistics import fewest_values, median_interval, speedup


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


@pytest.mark.parametrize(("confidence", "count"), [(0.5, 2), (0.95, 6), (0.99, 8), (0.999, 11)])
def test_it_takes_some_values_to_be_confident(confidence: float, count: int) -> None:
    assert fewest_values(confidence) == count


def test_speedup_is_paired_so_common_noise_cancels() -> None:
    noise = random.Random(1)
    common = [noise.uniform(1, 3) for _ in range(40)]
    ratio, (low, high) = speedup([1.25 * c for c in common], common)
    assert ratio == pytest.approx(1.25) and low == pytest.approx(1.25) and high == pytest.approx(1.25)
