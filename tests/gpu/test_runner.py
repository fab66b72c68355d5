"""The live runner on real GPUs: what bad candidates do to it there, and what conditions do to figures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.runner import Candidate, Effort, LiveRunner, Measurement

pytestmark = pytest.mark.gpu

WORLD = max(1, min(4, torch.cuda.device_count()))
GEMM = AllGatherGemm(256, 512, 512, "bf16", "m", WORLD)
DEADLINE_S = 8.0
QUICK = Effort(samples=4)

FATES = {
    "wrong_element": ("wrong_result", "relative error"),
    "skips_tile": ("wrong_result", "relative error inf"),
    "only_first_input": ("wrong_result", "input set 1"),
    "stale": ("wrong_result", "input set 1"),
    "kernel_hang": ("hang", "rank 1 waited for flag 0 of rank 0: needed 1, saw 0"),
    "illegal_access": ("crash", "illegal memory access"),
    "exits": ("crash", "rank 1 exited with code 3"),
    "sleeps": ("hang", "rank 1 at 'candidate 0: verify 0'"),
    "no_memory": ("out_of_resources", "does not fit"),
    "no_device_memory": ("out_of_resources", "OutOfMemoryError"),
    "too_much_shared_memory": ("out_of_resources", "shared memory"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[LiveRunner]:
    live = LiveRunner(detect(), WORLD, deadline_s=DEADLINE_S, modules=("tests.runner.faults",))
    yield live
    live.close()


def measure(
    runner: LiveRunner, *variants: str, effort: Effort = QUICK, conditions: Conditions | None = None
) -> list[Measurement]:
    return runner.measure(GEMM, [Candidate(Config(variant), conditions or Conditions()) for variant in variants], effort)


@pytest.mark.parametrize("fault", FATES)
def test_a_bad_candidate_costs_one_trial_and_says_why(runner: LiveRunner, fault: str) -> None:
    measure(runner, "bsp")
    started = time.monotonic()
    (bad,) = measure(runner, fault)
    assert time.monotonic() - started < DEADLINE_S + 10
    status, cause = FATES[fault]
    assert (bad.status, bad.verified) == (status, False), bad.error
    assert cause in (bad.error or "")
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


def test_a_race_passes_a_plain_trial_and_is_caught_by_the_soak(runner: LiveRunner) -> None:
    good, bad = measure(runner, "bsp", "races", effort=Effort(samples=4, soak=3000))
    assert good.status == "ok" and good.conditions["soak"] == 3000, good.error
    assert bad.status == "wrong_result" and " of 3000, input set " in (bad.error or ""), bad.error
    (eager,) = measure(runner, "races", effort=Effort(samples=4, soak=3000), conditions=Conditions("eager"))
    assert eager.status == "wrong_result" and "soak" in (eager.error or ""), eager.error


def test_a_wait_in_vain_in_the_soak_is_a_hang(runner: LiveRunner) -> None:
    (hung,) = measure(runner, "kernel_hang_later", effort=Effort(samples=4, soak=3000))
    assert hung.status == "hang" and "soak" in (hung.error or ""), hung.error
    assert "rank 1 waited for flag 0 of rank 0" in (hung.error or "")


def test_a_rank_that_sleeps_in_the_soak_is_a_hang(runner: LiveRunner) -> None:
    # Eager, since a replayed graph calls no Python.
    effort = Effort(samples=4, soak=3000)
    (hung,) = measure(runner, "sleeps_in_soak", effort=effort, conditions=Conditions("eager"))
    assert hung.status == "hang" and "candidate 0: soak after " in (hung.error or ""), hung.error


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGSTOP), (WORLD - 1, signal.SIGKILL)])
def test_a_rank_that_is_killed_or_stopped_in_mid_trial_costs_that_trial(
    runner: LiveRunner, rank: int, number: signal.Signals
) -> None:
    measure(runner, "bsp")
    timer = threading.Timer(0.5, os.kill, (runner.pool.ranks[rank].child.process.pid, number))
    timer.start()
    started = time.monotonic()
    (hit,) = measure(runner, "bsp", effort=Effort(samples=4, soak=1_000_000))
    assert time.monotonic() - started < DEADLINE_S + 10
    # The other ranks may find out first, and die of it.
    assert hit.status in ("crash", "hang"), hit.error
    assert f"rank {rank} " in (hit.error or "")
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


def test_skew_is_part_of_the_figure(runner: LiveRunner) -> None:
    """The last of W ranks is late by W / (W + 1) of the skew on average, and all results wait for it."""
    effort = Effort(samples=100, seconds=2.0)
    (little,) = measure(runner, "bsp", effort=effort, conditions=Conditions(skew_us=1.0))
    (much,) = measure(runner, "bsp", effort=effort, conditions=Conditions(skew_us=400.0))
    assert little.latency_us and much.latency_us, (little.error, much.error)
    expected = 400.0 * WORLD / (WORLD + 1)
    assert 0.75 * expected < much.latency_us - little.latency_us < 1.2 * expected


def test_warm_inputs_are_not_slower_than_cold_ones(runner: LiveRunner) -> None:
    effort = Effort(samples=50, seconds=1.0)
    (cold,) = measure(runner, "bsp", effort=effort)
    (warm,) = measure(runner, "bsp", effort=effort, conditions=Conditions(l2="warm"))
    assert warm.latency_us and cold.latency_us, (warm.error, cold.error)
    assert warm.latency_us < 1.05 * cold.latency_us


def test_a_killed_pool_leaves_no_memory_on_the_devices() -> None:
    free = [torch.cuda.mem_get_info(device)[0] for device in range(WORLD)]
    live = LiveRunner(detect(), WORLD, deadline_s=DEADLINE_S)
    try:
        (measurement,) = measure(live, "bsp")
        assert measurement.status == "ok", measurement.error
        taken = [before - torch.cuda.mem_get_info(device)[0] for device, before in enumerate(free)]
        assert min(taken) > 1 << 30, "the ranks hold their heaps"
    finally:
        live.close()
    deadline = time.monotonic() + 5.0
    while (left := [before - torch.cuda.mem_get_info(device)[0] for device, before in enumerate(free)]) and max(left) > 64 << 20:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
