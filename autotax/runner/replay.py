"""The replayed runner: answers from records of a live one, so that searches can be studied without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotax.problem import Problem
from autotax.runner.measurement import Candidate, Effort, Measurement


class ReplayRunner:
    """Measurements by (problem, candidate). What was never measured is infeasible, and its error says so."""

    def __init__(self, records: Iterable[tuple[Problem, Measurement]]) -> None:
        self._records = {(problem, measurement.candidate): measurement for problem, measurement in records}

    def measure(self, problem: Problem, candidates: Sequence[Candidate], effort: Effort) -> list[Measurement]:  # noqa: ARG002
        return [
            self._records.get((problem, candidate), Measurement(candidate, "infeasible", "there is no record of this config"))
            for candidate in candidates
        ]

    def close(self) -> None:
        pass
