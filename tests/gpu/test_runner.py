"""The live runner on real GPUs: what bad candidates do to it there."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from autotax.config import Config
from autotax.hardware import detect
from autotax.problem import AllGatherGemm
from autotax.runner import Candidate, Effort, LiveRunner

pytestmark = pytest.mark.gpu

WORLD = max(1, min(4, torch.cuda.device_count()))
GEMM = AllGatherGemm(256, 512, 512, "bf16", "m", WORLD)
DEADLINE_S = 12.0

FATES = {
    "wrong_element": ("wrong_result", "relative error"),
    "skips_tile": ("wrong_result", "relative error inf"),
    "only_first_input": ("wrong_result", "input set 1"),
    "kernel_hang": ("hang", "rank 1 waited for flag 0 of rank 0: needed 1, saw 0"),
    "illegal_access": ("crash", "illegal memory access"),
    "exits": ("crash", "rank 1 exited with code 3"),
    "sleeps": ("hang", "rank 1 at 'candidate 0: verify 0'"),
    "no_memory": ("out_of_resources", "does not fit"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[LiveRunner]:
    live = LiveRunner(detect(), WORLD, deadline_s=DEADLINE_S, plugins=("tests.runner.faults",))
    yield live
    live.close()


@pytest.mark.parametrize("fault", FATES)
def test_a_bad_candidate_costs_one_trial_and_says_why(runner: LiveRunner, fault: str) -> None:
    runner.measure(GEMM, [Candidate(Config("bsp"))], Effort(samples=4))
    started = time.monotonic()
    (bad,) = runner.measure(GEMM, [Candidate(Config(fault))], Effort(samples=4))
    assert time.monotonic() - started < DEADLINE_S + 10
    status, cause = FATES[fault]
    assert (bad.status, bad.verified) == (status, False), bad.error
    assert cause in (bad.error or "")
    (after,) = runner.measure(GEMM, [Candidate(Config("bsp"))], Effort(samples=4))
    assert after.status == "ok", after.error
