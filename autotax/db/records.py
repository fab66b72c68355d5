"""What goes into a store and comes out of it: plain frozen values, free of any database."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import TRIAL_STATUSES
from autotax.hardware import Hardware
from autotax.software import Environment

Samples = list[list[float]]
"""Microseconds of each call, one list per rank."""


@dataclass(frozen=True)
class RunRecord:
    """One call of the tuner: what it tuned, where, and how it ended. A run that was killed stays `running`."""

    id: int
    problem: Problem
    hardware: Hardware
    environment: Environment
    settings: dict[str, Any]
    status: str
    started_at: datetime
    ended_at: datetime | None = None
    notices: tuple[str, ...] = ()
    """What was noticed meanwhile that the user should know, one line each, in the order in which it came up."""
    accounts: dict[str, float] = field(default_factory=dict)
    """Figures of the run itself, for instance where its seconds went; empty until it ends."""


@dataclass(frozen=True)
class TrialRecord:
    """One config that was tried, whatever came of it. The store fills in what follows `conditions`."""

    number: int
    """The trial's place in the run."""
    config: Config
    status: str
    latency_us: float | None = None
    """Median over samples of the maximum over ranks."""
    samples: Samples | None = None
    slowest_rank: int | None = None
    compile_s: float | None = None
    verified: bool = False
    """The output was compared with the reference, on all ranks, and is right."""
    relative_error: float | None = None
    """The greatest over ranks. NaN is kept as infinity, for SQL has no NaN."""
    error: str | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    """How it was measured: `Conditions.to_dict()` and more. Figures of other conditions do not compare."""

    kernel_digest: str | None = field(default=None, compare=False)
    """Of the sources of its variant; None before it is stored, if they are those of today."""
    id: int | None = field(default=None, compare=False)
    created_at: datetime | None = field(default=None, compare=False)
    run: RunRecord | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.status not in TRIAL_STATUSES:
            raise ValueError(f"trial status is {self.status!r}; allowed are {', '.join(TRIAL_STATUSES)}")
        if self.status == "ok" and self.latency_us is None:
            raise ValueError("a trial that is ok has a latency")

    @property
    def deployed(self) -> Conditions:
        """The conditions that its run tunes for. A search measures calls back to back that its finalists meet in place."""
        asked = self.run.settings.get("conditions") if self.run else None
        return Conditions.from_dict(asked if isinstance(asked, dict) else self.conditions)

    @property
    def run_id(self) -> int | None:
        return self.run.id if self.run else None


@dataclass(frozen=True)
class WinnerRecord:
    """The config to run for a problem, and how far it is ahead of bulk-synchronous (BSP) in one interleaved round.

    At most one winner exists for each `key`.
    """

    problem: Problem
    hardware: Hardware
    environment: Environment
    trial_id: int
    config: Config
    kernel_digest: str = field(kw_only=True)
    """Of the sources of its variant (`autotax.digests.variant_digest`): when they change, it is stale."""
    latency_us: float
    baseline_us: float
    baseline: Config
    speedup: float
    """baseline_us / latency_us, with the ends of its confidence interval."""
    interval_low: float
    interval_high: float
    tie: bool
    """The interval did not separate the finalists; `config` is the simplest of them."""
    verified: bool
    samples: dict[str, Samples] | None = None
    """All finalists of the round, by config digest."""
    conditions: Conditions = field(default_factory=Conditions)
    """The conditions of the finalist round."""

    created_at: datetime | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, str, str, int, str, str, str]:
        """(problem, hardware digest, kernel digest, world size, comm library, conditions, triton)."""
        world_size, conditions = self.problem.world_size, self.conditions.key
        where = self.hardware.digest, self.kernel_digest
        return (self.problem.key, *where, world_size, self.comm, conditions, self.environment.triton)

    @property
    def comm(self) -> str:
        return self.environment.comm


@dataclass(frozen=True)
class MissRecord:
    """A problem that a program asked for and that nobody has tuned."""

    problem: Problem
    hardware: Hardware
    conditions: Conditions
    count: int
    last_asked: datetime
