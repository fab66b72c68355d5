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
    """The URL of the database as seen from the hosts."""
    fleet: str
    slot: int
    backend: str | None = None
    suffix: str = ""
    """Distinguishes workers on the same host."""
    lease_s: float = LEASE_S
    """Seconds that a claim holds without renewal. When a host is lost, its problem goes to another host after this time."""
    hang_s: float = HANG_S
    """A tuner that sends no message for this time is ended."""
    patience_s: float = PATIENCE_S
    """Seconds to wait for a database that does not answer."""
    bench: str = "autotax.fleet.tuner_process"
    """The module of the tuner process."""

    @property
    def beat_s(self) -> float:
        """Seconds between two renewals. Several renewals may be late before a claim lapses."""
        return min(10.0, self.lease_s / 6)


@dataclass(frozen=True)
class FleetJob:
    """A problem and its search settings."""

    problem: Problem
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        return {"problem": self.problem.to_dict(), "settings": self.settings.to_dict()}


@dataclass(frozen=True)
class Probe:
    """Requests a measurement of BSP, which serves to compare hosts of one kind."""

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
    """The end of a job. `how` is `tuned`, `unverified` (nothing could be verified), `interrupted`, `refused` (the job does not
    fit the machine) or `trouble` (the machine or the database failed, and the same job may go on later).
    """

    how: str
    told: str = ""


@dataclass(frozen=True)
class Claim:
    """A problem that a worker holds."""

    id: int
    job: FleetJob
    taken_before: bool = field(default=False)
    """Whether a worker of this fleet has begun the problem before. Then the tuner goes on from the stored trials."""


# Engines

MOST_STARTS = 5
"""A slot whose worker was lost this many times is given up."""


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine."""

    engine: str
    address: str = ""
    hosts: int | None = None
    """Number of hosts; None: as many as the engine has."""
    backend: str | None = None
    parameters: Mapping[str, str | bool] = field(default_factory=dict)
    """Parameters for Slurm, for instance `partition`."""
    logs: Path = Path("fleet-logs")
    wait_s: float = 600.0
    """Seconds to wait for hosts at the start."""


@dataclass(frozen=True)
class Notice:
    """A worker in a slot has ended. `lost`: it ended without a message; another worker may start in its slot."""

    slot: int
    lost: bool
    text: str = ""


class Engine(Protocol):
    def start(self, order: Order) -> int:
        """Starts one worker on each host, with the order and a separate slot. Returns the number of slots."""
        ...

    def watch(self) -> list[Notice]:
        """Workers that ended since the last call. A worker that was lost is started again, MOST_STARTS times at most."""
        ...

    @property
    def running(self) -> int:
        """The number of slots whose worker runs or waits to run."""
        ...

    def close(self) -> None:
        """Ends all remaining workers by force. Safe to call twice."""
        ...
