"""The conformance suite of runners: live on CPU ranks, replayed, and over a made-up landscape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotax.core.conditions import ON_CPU
from autotax.core.config import Config
from autotax.runner import Candidate, Effort, LiveRunner, Measurement
from results.search.replay_runner import ReplayRunner
from tests.conformance.runners import CHECKS, RunnerCase, check_runner
from tests.runner.small import GEMM
from tests.tuner.synthetic import SyntheticRunner

BSP, PUSH = (Candidate(config, ON_CPU) for config in (Config("bsp"), Config.of("push", block_m=16)))
NEVER_TRIED = Candidate(Config("never tried"), ON_CPU)
MADE_UP = {"bsp": 130.0, "push": 100.0}


def synthetic() -> SyntheticRunner:
    return SyntheticRunner(lambda config: MADE_UP.get(config.variant, "wrong_result"))


def replayed() -> ReplayRunner:
    """A runner that replays records with different numbers of samples."""
    made = [synthetic().measure(GEMM, [good], Effort(samples=samples))[0] for good, samples in ((BSP, 9), (PUSH, 3))]
    return ReplayRunner((GEMM, measurement) for measurement in made)


@pytest.fixture(scope="module", params=["live", "replayed", "synthetic"])
def case(request: pytest.FixtureRequest) -> Iterator[RunnerCase]:
    if request.param == "live":
        live: LiveRunner = request.getfixturevalue("runner")
        yield RunnerCase(live, GEMM, [BSP, Candidate(Config("dawdles"), ON_CPU)], Candidate(Config("wrong_element"), ON_CPU))
    elif request.param == "replayed":
        yield RunnerCase(replayed(), GEMM, [BSP, PUSH], NEVER_TRIED)
    else:
        yield RunnerCase(synthetic(), GEMM, [BSP, PUSH], NEVER_TRIED)


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(case: RunnerCase, name: str) -> None:
    CHECKS[name](case)


class Forgetful(SyntheticRunner):
    """Omits the measurements of failed candidates."""

    def measure(self, *arguments, **more) -> list[Measurement]:  # type: ignore[no-untyped-def]
        return [measurement for measurement in super().measure(*arguments, **more) if measurement.verified]


def test_what_fails_is_told_in_a_line_each_and_the_runner_is_closed() -> None:
    closed = []
    runner = Forgetful(lambda config: MADE_UP.get(config.variant, "wrong_result"))
    runner.close = lambda: closed.append(None)  # type: ignore[method-assign]
    with pytest.raises(AssertionError) as caught:
        check_runner(runner, GEMM, [BSP, PUSH], NEVER_TRIED)
    failures = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert failures == ["each_candidate_is_answered_in_its_place", "a_failure_is_an_answer_that_says_why"]
    assert closed
    assert check_runner(synthetic(), GEMM, [BSP, PUSH], NEVER_TRIED) == len(CHECKS)
