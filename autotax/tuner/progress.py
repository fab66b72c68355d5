"""What a tuning run is told to do, what it tells while it runs, and what it ends with: plain values."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotax.errors import UsageError
from autotax.hardware import Environment, Hardware
from autotax.problem import Problem
from autotax.runner.measurement import Measurement

SAMPLERS = ("tpe", "random", "gp")


@dataclass(frozen=True)
class Settings:
    """How to search. The budget is `trials` measured configs (those of earlier runs count on resume) or `timeout_s` seconds."""

    trials: int = 60
    timeout_s: float | None = None
    sampler: str = "tpe"
    seed: int = 0
    resume: bool = True
    variants: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UsageError(f"trials is {self.trials}; it must be at least 1: give another --trials")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"timeout is {self.timeout_s} s; it must be positive: give another --timeout")
        if self.sampler not in SAMPLERS:
            raise UsageError(f"sampler is {self.sampler!r}; allowed are {', '.join(SAMPLERS)}: give one of these as --sampler")
        if self.sampler == "gp" and importlib.util.find_spec("scipy") is None:
            raise UsageError("sampler is 'gp', which needs scipy: install autotax[gp], or give --sampler tpe")

    def to_dict(self) -> dict[str, Any]:
        return {
            "trials": self.trials,
            "timeout_s": self.timeout_s,
            "sampler": self.sampler,
            "seed": self.seed,
            "resume": self.resume,
            "variants": list(self.variants) if self.variants else None,
        }


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


@dataclass(frozen=True)
class Standing:
    """A finalist after the interleaved round. `speedup` is over BSP of the same round, with the interval that holds it; all
    those of a verdict hold together with 95 % confidence."""

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


class Listener(Protocol):
    """Somebody who watches a run."""

    def progress(self, progress: Progress) -> None: ...


class Silence:
    """A listener that does not care."""

    def progress(self, progress: Progress) -> None:
        pass
