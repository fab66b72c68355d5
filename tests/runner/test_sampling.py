"""How samples are taken: arrivals, suspicious samples, time on the device."""

from __future__ import annotations

import time
from functools import partial
from unittest.mock import Mock

import pytest

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.kernels.alignment import delay
from autotax.kernels.kernel import Kernel
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.operators import named
from autotax.runner import Effort, LiveRunner
from autotax.runner.benchmark import Bench, Outcome, Trial
from autotax.runner.rank_worker import Session
from autotax.runner.sampling import arrival_us, suspicious
from tests.runner.small import GEMM, measure

TRIES = 10
"""Attempts at a test that other work on the machine can disturb for a second."""


def test_arrivals_differ_between_ranks_and_samples_and_fill_the_skew() -> None:
    arrivals = [[arrival_us(50.0, 7, rank, number) for number in range(500)] for rank in range(4)]
    together = [us for rank in arrivals for us in rank]
    assert len(set(together)) == len(together)
    assert 0.0 <= min(together) < 2.0 and 48.0 < max(together) <= 50.0
    assert arrival_us(50.0, 7, 1, 3) == arrivals[1][3], "the seed decides"
    assert arrival_us(50.0, 8, 1, 3) != arrivals[1][3]
    assert arrival_us(0.0, 7, 1, 3) == 0.0


def test_skew_is_part_of_the_figure(runner: LiveRunner) -> None:
    """The first of two ranks waits for the last one, which is late by two thirds of the skew on average.

    A busy machine can only make samples longer, so the bounds are a lower one, and an upper one of the shortest sample. If the
    machine is too busy for the upper one, the test takes a greater skew.
    """
    for skew_us in (10_000.0, 50_000.0, 200_000.0):
        conditions = Conditions("eager", "warm", skew_us)
        (skewed,) = measure(runner, "bsp", effort=Effort(samples=40, seconds=60.0), conditions=conditions)
        if min(skewed.rounds, default=0.0) < skew_us and "remeasured" not in skewed.conditions:
            break
    assert skewed.status == "ok" and skewed.conditions["skew_us"] == skew_us
    assert skewed.latency_us and skewed.latency_us > 0.5 * skew_us
    assert min(skewed.rounds) < skew_us, "none waits for more than the last arrival"
    assert "remeasured" not in skewed.conditions, "a fast sample is a lucky arrival"


def test_a_sample_that_is_too_fast_is_taken_again(runner: LiveRunner) -> None:
    """Tries several times: a busy machine may spread the samples so far that none is an outlier."""
    for _ in range(TRIES):
        (measurement,) = measure(runner, "lucky", effort=Effort(samples=10, seconds=1.0))
        assert len(measurement.rounds) == 10
        if measurement.conditions.get("remeasured", 0):
            assert min(measurement.rounds) > 0.8 * 40_000
            return
    pytest.fail("no sample was taken again")


@pytest.mark.parametrize(("fewest", "samples", "taken"), [(0, 20, 3), (10, 20, 10), (10, 5, 5)])
def test_the_fewest_samples_are_taken_however_long_they_take(
    runner: LiveRunner, fewest: int, samples: int, taken: int
) -> None:
    (measurement,) = measure(runner, "dawdles", effort=Effort(samples=samples, seconds=0.001, fewest=fewest))
    assert len(measurement.rounds) == taken


def calls_of_a_sample(call_us: float) -> int:
    """The calls that a rank captures for a sample of a GPU, whose first graph takes `call_us` a call."""
    bench, session = Mock(lengthens_samples=True), object.__new__(Session)
    bench.rehearse.return_value = 50.0 + call_us
    bench.replay.return_value = call_us
    bench.least_calls = partial(Bench.least_calls, bench)
    session.world = Mock(gather=lambda figure, _: [figure])
    session.stages = Mock(run=lambda _, action, __: Outcome("ok", None, 0.0, (action(),)))
    session._prepare(0, Trial(bench))
    return int(bench.capture.call_args.args[0])


@pytest.mark.parametrize(("call_us", "calls"), [(3.0, 334), (30.0, 34), (300.0, 10), (1500.0, 4), (25_000.0, 1)])
def test_a_sample_has_so_many_calls_that_its_start_is_below_two_percent(call_us: float, calls: int) -> None:
    start_us = 14.0  # docs/measurement.md: 10 to 14 us in graphs of five calls or more
    assert calls_of_a_sample(call_us) == calls and start_us < 0.02 * calls * call_us


def test_a_round_is_suspicious_by_its_slowest_rank() -> None:
    assert suspicious([[10.0, 7.0, 10.0, 10.0], [9.0, 9.0, 9.0, 7.0]]) == []
    assert suspicious([[10.0, 7.0, 10.0, 7.0], [9.0, 9.0, 9.0, 7.0]]) == [3]
    assert suspicious([[10.0, 6.0, 10.0, 6.0, 10.0]]) == [], "so many are no exceptions"


def test_seconds_on_the_device_are_told(runner: LiveRunner) -> None:
    """Four verifying, two rehearsing, two warming and four timed calls, and one that is checked again, of 20 ms each."""
    started = time.perf_counter()
    (measurement,) = measure(runner, "dawdles")
    assert 13 * 0.02 <= measurement.device_s < time.perf_counter() - started
    (failed,) = measure(runner, "does_not_compile")
    assert failed.device_s == 0.0


class Waits(Kernel):
    def __call__(self, *_: object, **__: object) -> None:
        delay(self.context, 5.0)


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_the_delay_compiles_for_gpus(target: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    named(GEMM.op).peer("waits", Waits)
    (compiled,) = compile_offline(GEMM, Config("waits"), known_hardware(target))
    assert compiled.kernel == "delay_kernel"
