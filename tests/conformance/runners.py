"""The conformance suite of runners: live, replayed or simulated."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from autotax.core.problem import Problem
from autotax.core.settings import TRIAL_STATUSES
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner
from tests.conformance.checks import run_all

EFFORT = Effort(samples=4, seconds=0.05)
HOPELESS_US = 1e-3
"""A limit that every candidate exceeds."""


@dataclass(frozen=True)
class RunnerCase:
    """A runner, and candidates of one problem: at least two correct ones, and one that fails in some way."""

    runner: Runner
    problem: Problem
    good: Sequence[Candidate]
    bad: Candidate

    def measure(self, *candidates: Candidate, effort: Effort = EFFORT) -> list[Measurement]:
        """Measures the candidates in one job."""
        return self.runner.measure(self.problem, candidates, effort)


def check_runner(runner: Runner, problem: Problem, good: Sequence[Candidate], bad: Candidate) -> int:
    """Runs the suite, closes the runner and returns the number of checks. Raises AssertionError with a line for each failure."""
    case = RunnerCase(runner, problem, good, bad)
    try:
        return run_all({name: partial(check, case) for name, check in CHECKS.items()})
    finally:
        runner.close()
        runner.close()  # which is safe


def nothing_asked_for_is_nothing_measured(case: RunnerCase) -> None:
    assert case.measure() == []


def each_candidate_is_answered_in_its_place(case: RunnerCase) -> None:
    asked = [case.good[0], case.bad, *case.good[1:], case.good[0]]
    measurements = case.measure(*asked)
    assert [m.candidate for m in measurements] == asked
    assert [m.verified for m in measurements] == [candidate != case.bad for candidate in asked]


def what_is_right_is_verified_and_timed_under_its_conditions(case: RunnerCase) -> None:
    for candidate in case.good:
        (measurement,) = case.measure(candidate)
        assert (measurement.status, measurement.error, measurement.verified) == ("ok", None, True)
        assert measurement.conditions.items() >= candidate.conditions.to_dict().items()
        assert measurement.latency_us == statistics.median(measurement.rounds) and min(measurement.rounds) > 0
        assert measurement.slowest_rank is not None and 0 <= measurement.slowest_rank < len(measurement.samples)


def samples_of_a_job_are_paired(case: RunnerCase) -> None:
    measurements = case.measure(*case.good)
    assert len({len(m.samples) for m in measurements}) == 1, "one list a rank"
    counts = {len(samples) for m in measurements for samples in m.samples}
    assert len(counts) == 1, "all candidates and ranks have equally many"
    assert 1 <= counts.pop() <= EFFORT.samples


def a_failure_is_an_answer_that_says_why(case: RunnerCase) -> None:
    (measurement,) = case.measure(case.bad)
    assert measurement.status in TRIAL_STATUSES and measurement.status not in ("ok", "pruned")
    assert measurement.error and not measurement.verified
    assert not measurement.samples and measurement.latency_us is None and measurement.slowest_rank is None
    (after,) = case.measure(case.good[0])
    assert after.status == "ok", after.error


def what_is_given_up_is_verified(case: RunnerCase) -> None:
    (measurement,) = case.measure(case.good[0], effort=Effort(samples=50, give_up_us=HOPELESS_US))
    assert measurement.status in ("ok", "pruned") and measurement.verified and measurement.rounds


def what_is_expected_is_chosen_from(case: RunnerCase) -> None:
    assert case.runner.foresight >= 1
    configs = [candidate.config for candidate in case.good][: case.runner.foresight]
    assert 0 <= case.runner.expect(case.problem, configs) < len(configs)


def what_is_done_meanwhile_is_done_once_at_most(case: RunnerCase) -> None:
    calls: list[None] = []
    (measurement,) = case.runner.measure(case.problem, case.good[:1], EFFORT, lambda: calls.append(None))
    assert measurement.status == "ok" and len(calls) <= 1


def what_fails_meanwhile_leaves_no_answer_to_the_next(case: RunnerCase) -> None:
    calls: list[None] = []

    def fail() -> None:
        calls.append(None)
        raise KeyError("as the suite wants it")

    try:
        case.runner.measure(case.problem, [case.bad], EFFORT, fail)
    except KeyError:
        assert calls
    else:
        assert not calls, "what was raised meanwhile is raised"
    (after,) = case.measure(case.good[0])
    assert (after.candidate, after.status) == (case.good[0], "ok"), after.error


CHECKS: dict[str, Callable[[RunnerCase], None]] = {
    check.__name__: check
    for check in (
        nothing_asked_for_is_nothing_measured,
        each_candidate_is_answered_in_its_place,
        what_is_right_is_verified_and_timed_under_its_conditions,
        samples_of_a_job_are_paired,
        a_failure_is_an_answer_that_says_why,
        what_is_given_up_is_verified,
        what_is_expected_is_chosen_from,
        what_is_done_meanwhile_is_done_once_at_most,
        what_fails_meanwhile_leaves_no_answer_to_the_next,
    )
}
