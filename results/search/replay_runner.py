"""The replayed runner: answers from records of a live one, so that searches can be studied without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db.records import TrialRecord
from autotax.runner.measurement import Candidate, Effort, Measurement, Overlap
from autotax.tuner.run_recorder import measurement_of


class ReplayRunner:
    """Measurements by (problem, candidate). A candidate without a record gets the status `infeasible`, with an error that says
    so.
    """

    def __init__(self, records: Iterable[tuple[Problem, Measurement]]) -> None:
        self._records = {(problem, measurement.candidate): measurement for problem, measurement in records}

    @classmethod
    def of(cls, trials: Iterable[TrialRecord]) -> ReplayRunner:
        """Takes stored trials (`Store.trials`). If a config has several, the last one counts."""
        return cls((trial.run.problem, measurement_of(trial)) for trial in trials if trial.run)

    def measure(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        effort: Effort,
        overlap: Overlap | None = None,  # noqa: ARG002
    ) -> list[Measurement]:
        """See Runner.measure. All candidates get the same number of samples, the least that one of them has, because only samples
        of the same round are paired.
        """
        measurements = [self._records.get((problem, candidate), _missing(candidate)) for candidate in candidates]
        rounds = min((len(m.rounds) for m in measurements if m.samples), default=0)
        return [replace(m, samples=tuple(rank[: min(rounds, effort.samples)] for rank in m.samples)) for m in measurements]

    @property
    def foresight(self) -> int:
        return 1

    def expect(self, problem: Problem, configs: Sequence[Config], later: Iterable[Config] = ()) -> int:  # noqa: ARG002
        return 0

    def close(self) -> None:
        pass


def _missing(candidate: Candidate) -> Measurement:
    return Measurement(candidate, "infeasible", "there is no record of this config")
