"""Progress and verdict of a tuning run and of a refresh, as plain values."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError, summary
from autotax.core.problem import Problem
from autotax.db.records import Stale
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.runner.measurement import Measurement
from autotax.software import Environment


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` with a row for each mapping. Raises UsageError without pandas."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise UsageError("to_frame needs pandas, which is not installed: run `pip install pandas`, or read the rows") from None
    return pandas.DataFrame(list(rows))


@dataclass(frozen=True)
class Progress:
    """The state of a run after a trial."""

    problem: Problem
    done: int
    total: int
    statuses: Mapping[str, int]
    last: Measurement | None
    best: Measurement | None
    """The fastest verified measurement so far."""
    baseline_us: float | None
    """The fastest verified bulk-synchronous latency so far."""
    seconds: float
    """Since the start of this run."""
    seconds_left: float | None
    """Until the search has used its time; None without a time limit."""
    limit_s: float | None = None
    """Seconds until the time limit; None without one."""
    phase: str = "searching"
    """`searching`, then `finalists`."""
    gain: float | None = None
    """Expected gain of the next eight trials, as a share of the best latency; None without a model."""

    def __repr__(self) -> str:
        """`<Progress my-op/m=512,...: searching, 30 of 60 trials, best push(comm=8) 118.2 us>`"""
        us = self.best.latency_us if self.best else None
        best = f", best {self.best.config} {us:.1f} us" if self.best and us is not None else ""
        return f"<Progress {self.problem.key}: {self.phase}, {self.done} of {self.total} trials{best}>"


@dataclass(frozen=True)
class Standing:
    """A finalist, with its speed-up over BSP of the same jobs. The interval contains that of another job with 95 % confidence."""

    measurement: Measurement
    speedup: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class FailedVariant:
    """A variant of which no trial was right, with the status and the error of its first trial."""

    variant: str
    trials: int
    status: str
    error: str


@dataclass(frozen=True)
class Verdict:
    """How a run ended. Without a winner, nothing could be verified, or the run was interrupted before the finalist round."""

    problem: Problem
    hardware: Hardware
    environment: Environment
    winner: Standing | None
    baseline: Measurement | None
    """The best BSP config, measured in the same round as the winner."""
    tie: bool
    """Whether BSP won although another config may be faster: none is faster with confidence, and the interval of at least one
    reaches above 1.
    """
    standings: tuple[Standing, ...] = ()
    """All verified finalists, fastest first."""
    trials: Mapping[str, int] = field(default_factory=dict)
    """How many trials ended with which status."""
    seconds: float = 0.0
    interrupted: bool = False
    conditions: Conditions = field(default_factory=Conditions)
    """The conditions that the run tuned for."""
    soak: int = 0
    """Replays with delayed ranks and changing inputs that each finalist passed; 0: the winner is not soaked."""
    notices: tuple[str, ...] = ()
    """Notices of the run, one line each, without repetitions."""
    accounts: Mapping[str, float] = field(default_factory=dict)
    """Where the time went; see Accounts.breakdown."""
    failed: tuple[FailedVariant, ...] = ()
    """The variants of which no trial was right."""
    late: bool = False
    """Whether the time limit came before the verdict. The trials are stored, and the next run goes on from there."""

    def __repr__(self) -> str:
        """`<Verdict my-op/m=512,...: push(comm=8) 1.31x over BSP [1.28, 1.33], 118.2 us; 60 trials>`, and the first error of the
        first variant that failed in all trials.
        """
        best = self.winner
        if best is None:
            outcome = "interrupted" if self.interrupted else "the time limit came first" if self.late else "nothing verified"
        else:
            (low, high), config = best.interval, best.measurement.config
            outcome = f"{config} {best.speedup:.2f}x over BSP [{low:.2f}, {high:.2f}]"
            if config.variant == "bsp":
                outcome = "within noise of BSP, which is kept" if self.tie else "nothing beats BSP yet"
            outcome += f", {best.measurement.latency_us:.1f} us" if best.measurement.latency_us is not None else ""
        for failed in self.failed[:1]:
            outcome += f"; {failed.variant} failed in all {failed.trials} trials: {failed.status}: {summary(failed.error)}"
        return f"<Verdict {self.problem.key}: {outcome}; {sum(self.trials.values())} trials>"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The finalists, fastest first: variant, parameters, latency in us, speed-up over BSP and its interval."""
        return [
            {
                "variant": standing.measurement.config.variant, **standing.measurement.config.values,
                "latency_us": standing.measurement.latency_us, "speedup": standing.speedup,
                "low": standing.interval[0], "high": standing.interval[1], "winner": standing == self.winner,
            }
            for standing in self.standings
        ]  # fmt: skip

    def to_frame(self) -> Any:
        """The rows as a `pandas.DataFrame`. Raises UsageError without pandas."""
        return frame(self.rows)


@dataclass(frozen=True)
class Refreshed:
    """The result of a refresh of one problem: its former winners, and the verdict of the new round."""

    stale: Stale
    verdict: Verdict

    @property
    def outcome(self) -> str:
        """`kept`: a former winner is fastest here too. `replaced`: an alternative is faster. `bsp`: nothing is faster than BSP.
        `failed`: nothing could be verified. `interrupted`, `late`: Ctrl-C or the time limit came first.
        """
        winner = self.verdict.winner
        if winner is None:
            return "interrupted" if self.verdict.interrupted else "late" if self.verdict.late else "failed"
        config = winner.measurement.config
        if self.verdict.tie or config.variant == registry.of(self.verdict.problem).baseline:
            return "bsp"
        return "kept" if config in self.stale.configs else "replaced"


class Listener(Protocol):
    """Receives the progress and the notices of a run."""

    def progress(self, progress: Progress) -> None: ...

    def notice(self, text: str) -> None:
        """A notice for the user, in one line; each comes once in a run."""
        ...


class Silence:
    """A listener that ignores everything."""

    def progress(self, progress: Progress) -> None:
        pass

    def notice(self, text: str) -> None:
        pass


# Where the time of a run went: on the devices, compiling, in the ranks' other work, in the tuner and its database.

@dataclass
class Accounts:
    """Kept while a run goes on. The search ends when `search_ended` is called; the time after it belongs to the finalists."""

    started: float = field(default_factory=time.monotonic)
    trials: int = 0
    """Trials of this run that were verified, timed and stored."""
    device_s: float = 0.0
    compile_s: float = 0.0
    measuring_s: float = 0.0
    search_s: float | None = None
    gain: float | None = None
    """Expected gain of eight more trials at the end of the search, as a share; None without a model."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def note(self, measurements: Sequence[Measurement], seconds: float, overlap_s: float = 0.0) -> None:
        """Records a job's wall time without the tuner's work that outlasted the ranks. `overlap_s` is the time of the tuner's
        work during the job, which is long when the database is locked.
        """
        self.measuring_s += seconds - max(0.0, overlap_s - sum(m.ranks_s for m in measurements))
        self.device_s += sum(m.device_s for m in measurements)
        self.compile_s += sum(m.compile_s for m in measurements)

    def search_ended(self) -> None:
        self.search_s = self.seconds

    def breakdown(self) -> dict[str, float]:
        """The accounts as stored and shown. `seconds`, `idle_share` (of the devices) and the four parts cover the whole run with
        its finalists. `trials` and `trials_per_minute` cover the search alone, which took `search_s`.
        """
        seconds = self.seconds
        gain = {} if self.gain is None else {"gain": self.gain}
        search_s = seconds if self.search_s is None else self.search_s
        return gain | {
            "device_s": self.device_s,
            "compile_s": self.compile_s,
            "ranks_s": max(0.0, self.measuring_s - self.device_s - self.compile_s),
            "tuner_s": max(0.0, seconds - self.measuring_s),
            "seconds": seconds,
            "idle_share": max(0.0, 1 - self.device_s / seconds) if seconds else 0.0,
            "trials": self.trials,
            "search_s": search_s,
            "trials_per_minute": self.trials / search_s * 60 if search_s else 0.0,
        }
