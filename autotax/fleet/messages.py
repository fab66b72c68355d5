"""Values that the driver, engines, workers and tuner processes exchange, and the protocol of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.hardware import Hardware
from autotax.software import Environment

LEASE_S = 60.0
HANG_S = 1800.0
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Order:
    """The settings of a worker."""

    url: str
    """The database, as the hosts reach it."""
    fleet: str
    slot: int
    backend: str | None = None
    suffix: str = ""
    """Tells workers apart that run on one host."""
    lease_s: float = LEASE_S
    """How long a claim holds that is not renewed: so long after a host was lost its problem goes to another one."""
    hang_s: float = HANG_S
    """A tuner that has told nothing for so long is ended."""
    patience_s: float = PATIENCE_S
    """How long a database that does not answer is waited for."""
    bench: str = "autotax.fleet.tuner_process"
    """The module that tunes, in a process of its own."""

    @property
    def beat_s(self) -> float:
        """Between two renewals: several may be late before a claim lapses."""
        return min(10.0, self.lease_s / 6)


@dataclass(frozen=True)
class FleetJob:
    """A problem, and how it is searched."""

    problem: Problem
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        return {"problem": self.problem.to_dict(), "settings": self.settings.to_dict()}


@dataclass(frozen=True)
class Probe:
    """Asks for a measurement of BSP, by which hosts of one kind are compared."""

    job: FleetJob


# Answers of a tuner process


@dataclass(frozen=True)
class HostHello:
    hardware: Hardware
    environment: Environment


@dataclass(frozen=True)
class TrialEnded:
    """A trial has ended. `done` and `wanted` count those of earlier runs too."""

    done: int
    wanted: int


@dataclass(frozen=True)
class Probed:
    us: float | None


@dataclass(frozen=True)
class Ended:
    """How a job ended: `tuned`; `unverified`, nothing could be verified; `interrupted`; `refused`, it does not fit the machine;
    `trouble`, the machine or the database let it down, and the same job may go on.
    """

    how: str
    told: str = ""


@dataclass(frozen=True)
class Claim:
    """A problem that a worker holds."""

    id: int
    job: FleetJob
    taken_before: bool = field(default=False)
    """Whether another worker, or this one, has begun it in this fleet: then it goes on from the trials kept."""


# Engines

MOST_STARTS = 5
"""A slot whose worker was lost so often is given up."""


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine."""

    engine: str
    address: str = ""
    hosts: int | None = None
    """None: as many as the engine has."""
    backend: str | None = None
    parameters: Mapping[str, str | bool] = field(default_factory=dict)
    """Handed on to Slurm, for instance `partition`."""
    logs: Path = Path("fleet-logs")
    wait_s: float = 600.0
    """How long hosts are waited for at the start."""


@dataclass(frozen=True)
class Notice:
    """Something became of the worker in a slot. `lost`: it ended without a word; another one may start in its slot."""

    slot: int
    lost: bool
    text: str = ""


class Engine(Protocol):
    def start(self, order: Order) -> int:
        """Starts one worker a host, each with the order and a slot of its own; how many slots there are."""
        ...

    def watch(self) -> list[Notice]:
        """Workers that ended since the last call. A worker that was lost is started again, MOST_STARTS times at most."""
        ...

    @property
    def running(self) -> int:
        """Slots whose worker runs, or waits to run."""
        ...

    def close(self) -> None:
        """Ends all workers that are left, at once. Safe to call twice."""
        ...
