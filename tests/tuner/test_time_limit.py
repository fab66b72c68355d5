"""The time limit of a run holds, whatever is slow, and the run says what it came before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotax.core.problem import Problem
from autotax.db import Store
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.runner.measurement import TimeIsUp
from autotax.tuner import tuning
from autotax.tuner.finalists import Paces
from tests.tuner.shared import gemm_landscape, run
from tests.tuner.synthetic import Clock, SyntheticRunner

GRACE_S = 1.0


class Slow(SyntheticRunner):
    """Takes `trial_s` seconds for a trial of the search and `finals_s` for a job of finals, or raises when the time is up."""

    def __init__(self, trial_s: float, finals_s: float, first_s: float = 0.0) -> None:
        super().__init__(gemm_landscape)
        self.clock = Clock()
        self.trial_s, self.finals_s, self.first_s = trial_s, finals_s, first_s
        self.soaks: list[int] = []

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        final = effort.samples != Effort().samples
        takes = self.finals_s if final else self.trial_s + (0.0 if self.searched else self.first_s)
        assert effort.within_s is not None
        self.clock.sleep(min(takes, effort.within_s))
        if takes > effort.within_s:
            raise TimeIsUp("rank 0 at 'soak after 3 of 20'")
        self.soaks += [effort.soak] * final
        return super().measure(problem, candidates, effort, overlap)


@pytest.mark.parametrize(
    ("runner", "late", "words"),
    [
        (Slow(0.05, 0.05), False, "ended the search after"),
        (Slow(0.05, 60.0), True, "came in the finals (rank 0 at 'soak after 3 of 20'), so nothing is decided"),
        (Slow(0.05, 0.0, first_s=60.0), True, "stopped the trial of bsp"),
        (Slow(60.0, 0.0), True, "came before anything but BSP was measured"),
    ],
    ids=["all is quick", "slow finals", "a slow start", "slow trials"],
)
def test_a_limit_holds_and_the_run_says_what_it_came_before(
    store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock, runner: Slow, late: bool, words: str
) -> None:
    monkeypatch.setattr(tuning, "GRACE_S", GRACE_S + tuning.CLOSING_S)
    runner.clock = clock
    verdict = run(store, runner, trials=10_000, timeout_s=2.0, soak=20)
    assert clock.now < 2.0 + GRACE_S + 0.1
    assert (verdict.late, verdict.winner is None) == (late, late) and any(words in notice for notice in verdict.notices)
    (ended,) = store.runs()
    assert ended.status == ("interrupted" if late else "done")
    assert len(store.trials()) >= sum(verdict.trials.values()), "what was measured is kept"


def test_a_run_that_came_too_late_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(tuning, "GRACE_S", GRACE_S + tuning.CLOSING_S)
    late, quick = Slow(0.05, 60.0), Slow(0.05, 0.05)
    late.clock = quick.clock = clock
    kept = run(store, late, trials=30, timeout_s=1.0).trials
    verdict = run(store, quick, trials=30, timeout_s=4.0)
    assert verdict.winner and sum(verdict.trials.values()) > sum(kept.values()) > 0


def test_a_slow_start_is_not_taken_for_the_pace_of_trials(store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(tuning, "GRACE_S", GRACE_S + tuning.CLOSING_S)
    done = []
    for seed, first_s in enumerate((1.7, 0.0)):
        runner = Slow(0.05, 0.05, first_s=first_s)
        runner.clock = clock
        verdict = run(store, runner, trials=10_000, timeout_s=4.0, soak=20, seed=seed, resume=False)
        assert verdict.winner
        done.append(sum(verdict.trials.values()))
    assert abs(done[0] - done[1]) <= 2, "ranks that start take no time of the search"


def test_fewer_finalists_and_then_a_shorter_soak_fit_into_less_time() -> None:
    paces = Paces(trial_s=1.0, call_s=0.08, on_gpu=False)
    assert paces.fitting(60.0, 20) == (6, 2, 20)
    assert paces.fitting(paces.expected_s(3, 20, 2), 20) == (2, 1, 20)
    challengers, baselines, soak = paces.fitting(7.0, 20)
    assert (challengers, baselines) == (1, 1) and 1 <= soak < 20
    assert paces.fitting(0.0, 20) == (1, 1, 1) and paces.fitting(0.0, 0) == (1, 1, 0)
