"""The interface between tuner and runner: candidates, effort, measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import joined, summary
from autotax.core.problem import Problem
from autotax.core.settings import TRIAL_STATUSES

REFERENCES = 4
"""References of a problem on a rank at most. Each may take as long as a stage of a candidate."""
PAIRED = "paired"
"""The key in a measurement's conditions with the ratio to the incumbent of a search, which was measured in the same job."""


@dataclass(frozen=True)
class Candidate:
    """A config, and the conditions under which it is called."""

    config: Config
    conditions: Conditions = field(default_factory=Conditions)


@dataclass(frozen=True)
class Effort:
    """How hard to measure. `seconds` bounds the timing of one candidate, `samples` the number of its samples. At least `fewest`
    samples are taken, however long they take.
    """

    samples: int = 20
    seconds: float = 0.25
    fewest: int = 0
    give_up_us: float | None = None
    """A candidate whose first samples are slower than this is not measured further (status `pruned`)."""
    soak: int = 0
    """Replays with random delays and changing inputs, each compared with its reference, that a timed candidate must pass."""
    within_s: float | None = None
    """Seconds that the whole job may take, restarts of ranks included; a live runner then raises TimeIsUp. None: no limit."""


class TimeIsUp(Exception):
    """The job did not end within `Effort.within_s`. Its ranks are killed, and its candidates are not to blame."""


@dataclass(frozen=True)
class RankReport:
    """One rank's account of one candidate. `samples` are microseconds a call."""

    status: str
    error: str | None = None
    samples: tuple[float, ...] = ()
    compile_s: float = 0.0
    relative_error: float | None = None
    device_s: float = 0.0
    """Seconds in stages that work on the device."""
    remeasured: int = 0
    """Suspiciously fast samples that were taken again."""
    soaked: int = 0
    """Replays of the soak that the candidate passed."""
    readings: dict[str, float] = field(default_factory=dict)
    """Further figures of the same samples, over all ranks, as stored: see Measurement."""


@dataclass(frozen=True)
class Measurement:
    """The measurement of a candidate, from the reports of all ranks."""

    candidate: Candidate
    status: str
    error: str | None = None
    samples: tuple[tuple[float, ...], ...] = ()
    """Microseconds a call, one tuple a rank; the i-th samples of all ranks were taken at the same time. In place, a sample is the
    time of this rank with calls minus the time of the slowest rank without calls. It may be negative.
    """
    compile_s: float = 0.0
    relative_error: float | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    """How the candidate was measured, as stored: `Conditions.to_dict()` and further facts needed to read the figure. In place it
    has `behind` (`Operator.behind`), `back_to_back_us`, and `between_us`, the time of the work before one call.
    """
    device_s: float = 0.0
    """Seconds of the stages that work on the device; the maximum over the ranks."""
    ranks_s: float = 0.0
    """Seconds of all work of the ranks, by their own clocks. A job of several candidates is divided among them."""
    notices: tuple[str, ...] = ()
    """Notices for the user from this measurement: a slow rank, lower clocks, another process on the GPU. One line each."""
    jobs: tuple[int, ...] = ()
    """Number of samples of each job, in order; empty if all samples are of one job."""

    @classmethod
    def merge(cls, candidate: Candidate, reports: Sequence[RankReport], conditions: dict[str, Any]) -> Measurement:
        """Merges the reports of all ranks, in rank order: the gravest status, every rank's cause, the worst error."""
        status = max((report.status for report in reports), key=TRIAL_STATUSES.index)
        errors = [report.error for report in reports if report.error and report.status == status]
        relative_errors = [report.relative_error for report in reports if report.relative_error is not None]
        passed = {"soak": reports[0].soaked} if reports[0].soaked else {}
        again = {"remeasured": reports[0].remeasured} if reports[0].remeasured else {}
        return cls(
            candidate=candidate,
            status=status,
            error=joined(errors) if errors else None,
            samples=tuple(report.samples for report in reports) if all(report.samples for report in reports) else (),
            compile_s=max(report.compile_s for report in reports),
            relative_error=max(relative_errors) if relative_errors else None,
            conditions=conditions | passed | again | reports[0].readings,
            device_s=max(report.device_s for report in reports),
        )

    def __repr__(self) -> str:
        """`<Measurement push(comm=8): ok, 118.2 us, 50 samples>`"""
        figure = f", {self.latency_us:.1f} us, {len(self.samples[0])} samples" if self.latency_us is not None else ""
        error = f", {summary(self.error)}" if self.error else ""
        return f"<Measurement {self.config}: {self.status}{figure}{error}>"

    @cached_property
    def config(self) -> Config:
        return self.candidate.config

    @cached_property
    def verified(self) -> bool:
        """Whether the run that took the samples checked its output and found it right."""
        return self.status in ("ok", "pruned")

    @cached_property
    def rounds(self) -> list[float]:
        """For each sample the maximum over the ranks: the time after which every rank had its result."""
        return [max(sample) for sample in zip(*self.samples, strict=True)]

    @property
    def rounds_by_job(self) -> list[list[float]]:
        """The rounds of each job. Jobs differ by more than samples of one job do."""
        rounds = iter(self.rounds)
        return [list(islice(rounds, count)) for count in self.jobs or (len(self.rounds),)]

    @cached_property
    def latency_us(self) -> float | None:
        """Median over the samples of the maximum over the ranks; None without samples."""
        return statistics.median(self.rounds) if self.samples else None

    @cached_property
    def score_us(self) -> float | None:
        """The figure that a search compares, in microseconds: the figure from the pair if there is one, else the latency."""
        paired = self.conditions.get(PAIRED)
        return float(paired["us"]) if paired else self.latency_us

    @property
    def back_to_back_us(self) -> float | None:
        """The latency of the same calls back to back, for calls that are captured; None where that was not measured."""
        us = self.conditions.get("back_to_back_us")
        return self.latency_us if us is None and self.candidate.conditions.mode == "graph" else us

    @property
    def slowest_rank(self) -> int | None:
        """The rank with the greatest median."""
        medians = [statistics.median(samples) for samples in self.samples]
        return medians.index(max(medians)) if medians else None


Overlap = Callable[[], None]
"""Work of the caller while the ranks measure. The runner may call it late, after the ranks have finished, or never."""


class Runner(Protocol):
    """Measures candidates. A live runner has ranks and devices, a replayed one has their records."""

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        """One measurement for each candidate, in order; with several, their samples are interleaved.

        A candidate that fails in any way is an answer, not an exception.
        """
        ...

    @property
    def foresight(self) -> int:
        """How many configs it is good to know in advance; 1 if none is compiled ahead."""
        ...

    def expect(self, problem: Problem, configs: Sequence[Config], later: Iterable[Config] = ()) -> int:
        """Announces configs that may be measured soon. Returns the index of one that can be measured without waiting for a
        compiler. Idle compilers compile the configs of `later`.
        """
        ...

    def close(self) -> None:
        """Gives ranks and devices back; safe to call twice."""
        ...
