"""What a tuning run tells while it runs, and what it ends with: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.hardware import Environment, Hardware
from autotax.runner.measurement import Measurement


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a trial."""

    problem: Problem
    done: int
    wanted: int
    statuses: Mapping[str, int]
    last: Measurement | None
    best: Measurement | None
    """The fastest verified measurement so far."""
    baseline_us: float | None
    """The fastest verified bulk-synchronous latency so far."""
    seconds: float
    """Since the start of this run."""
    seconds_left: float | None
    phase: str = "searching"
    """`searching`, then `finalists`."""
    gain: float | None = None
    """What the next eight trials are expected to win, as a share of the best latency; None where no model tells."""


@dataclass(frozen=True)
class Standing:
    """A finalist after the interleaved jobs. `speedup` is over BSP of the same jobs, with the interval in which another job
    finds it with 95 % confidence."""

    measurement: Measurement
    speedup: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Verdict:
    """How a run ended. Without a winner nothing could be verified, or the run was interrupted before the finalists met."""

    problem: Problem
    hardware: Hardware
    environment: Environment
    winner: Standing | None
    baseline: Measurement | None
    """The best BSP config, measured in the same round as the winner."""
    tie: bool
    """Whether the winner could not be told apart from BSP (then BSP wins, being simpler)."""
    standings: tuple[Standing, ...] = ()
    """All verified finalists, fastest first."""
    trials: Mapping[str, int] = field(default_factory=dict)
    """How many trials ended with which status."""
    seconds: float = 0.0
    interrupted: bool = False
    conditions: Conditions = field(default_factory=Conditions)
    """What was tuned for."""
    soak: int = 0
    """Replays with delayed ranks and changing inputs that each finalist passed; 0: the winner is not soaked."""
    notices: tuple[str, ...] = ()
    """What was noticed on the way, one line each, each once."""
    accounts: Mapping[str, float] = field(default_factory=dict)
    """Where the time went; see Accounts.told."""


class Listener(Protocol):
    """Somebody who watches a run."""

    def progress(self, progress: Progress) -> None: ...

    def notice(self, text: str) -> None:
        """Something that the user should know, in one line; each is told once a run."""
        ...


class Silence:
    """A listener that does not care."""

    def progress(self, progress: Progress) -> None:
        pass

    def notice(self, text: str) -> None:
        pass
