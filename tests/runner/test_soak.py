"""The soak on CPU ranks: the faults that only a soak finds, and its duration."""

from __future__ import annotations

import time

import pytest

from autotax.core.conditions import ON_CPU
from autotax.operators.problems import FlashDecode
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.spaces import space_for
from tests.runner.small import CPU, measure


def test_a_race_passes_a_plain_trial_and_is_caught_by_the_soak(runner: LiveRunner) -> None:
    (plain,) = measure(runner, "races")
    assert plain.status == "ok" and "soak" not in plain.conditions
    (soaked,) = measure(runner, "races", effort=Effort(samples=4, seconds=0.05, soak=2000))
    assert (soaked.status, soaked.verified, soaked.samples) == ("wrong_result", False, ())
    assert "soak" in (soaked.error or "") and "rank 1: relative error" in (soaked.error or "")
    assert " of 2000, input set " in (soaked.error or "")
    assert "soak" not in soaked.conditions


def test_what_is_right_passes_and_the_others_are_not_harmed_by_what_is_wrong(runner: LiveRunner) -> None:
    good, bad, also_good = measure(runner, "bsp", "races", "bsp", effort=Effort(samples=4, seconds=0.05, soak=1000))
    assert (good.status, bad.status, also_good.status) == ("ok", "wrong_result", "ok")
    assert good.conditions["soak"] == also_good.conditions["soak"] == 1000
    assert good.samples, "the samples taken before the soak are kept"


def test_interpreted_kernels_are_soaked_with_ragged_lengths(runner: LiveRunner) -> None:
    problem = FlashDecode(1, 4, 2, 16, 40, "fp32", 2)
    candidate = Candidate(space_for(problem, CPU).default("fused"), ON_CPU)
    (measurement,) = runner.measure(problem, [candidate], Effort(samples=4, seconds=0.05, soak=12))
    assert measurement.status == "ok", measurement.error
    assert measurement.conditions["soak"] == 12


@pytest.mark.volume
def test_a_soak_may_take_longer_than_the_deadline_as_long_as_it_goes_on(hasty: LiveRunner) -> None:
    started = time.monotonic()
    (slow,) = measure(hasty, "dawdles", effort=Effort(samples=4, seconds=0.05, soak=290))
    assert slow.status == "ok", slow.error
    assert time.monotonic() - started > hasty.deadline_s, "the soak was too short to show anything"


def test_a_hang_in_the_soak_ends_at_the_deadline(hasty: LiveRunner) -> None:
    started = time.monotonic()
    (hung,) = measure(hasty, "sleeps_late", effort=Effort(samples=4, seconds=0.05, soak=2000))
    assert time.monotonic() - started < 500
    assert hung.status == "hang" and "rank 1 at 'candidate 0: soak after 0 of 2000'" in (hung.error or "")


def test_what_was_given_up_is_not_soaked(runner: LiveRunner) -> None:
    (measurement,) = measure(runner, "bsp", effort=Effort(samples=4, give_up_us=0.001, soak=1000))
    assert measurement.status == "pruned" and "soak" not in measurement.conditions
