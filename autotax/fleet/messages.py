"""Plain values of a fleet: those that the driver, engines, workers and tuner processes exchange, and the state of a fleet."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
    tuner_module: str = "autotax.fleet.tuner_process"
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
    """A trial has ended. `done` and `total` count those of earlier runs too."""

    done: int
    total: int


@dataclass(frozen=True)
class Probed:
    us: float | None


@dataclass(frozen=True)
class Ended:
    """The end of a job. `how` is `tuned`, `unverified` (nothing could be verified), `interrupted`, `refused` (the job does not
    fit the machine) or `trouble` (the machine or the database failed, and the same job may go on later).
    """

    how: str
    message: str = ""


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


# State of a fleet: snapshots, events between them, and estimates of the remaining time.

T = TypeVar("T")
PRESENT = ("idle", "working")
"""States of a host that takes part."""


@dataclass(frozen=True)
class HostStatus:
    id: str
    slot: int
    name: str
    kind: str
    hardware: str
    state: str
    note: str
    claim: int | None
    done: int
    total: int
    trials: int
    busy_s: float
    age_s: float
    silent_s: float

    @property
    def present(self) -> bool:
        return self.state in PRESENT


@dataclass(frozen=True)
class ClaimStatus:
    id: int
    problem: str
    kind: str
    conditions: str
    host: str | None
    holder: str | None
    outcome: str | None
    message: str
    seconds: float | None
    estimate_s: float | None
    lapses: int
    failures: int
    failed_on: str | None
    lapsed: bool


@dataclass(frozen=True)
class Snapshot:
    """All hosts that ever took part, and all claims."""

    hosts: tuple[HostStatus, ...] = ()
    claims: tuple[ClaimStatus, ...] = ()
    seconds: float = 0.0
    waiting: int = 0
    """Hosts that the engine has not brought yet."""

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(host.kind for host in self.hosts))

    @property
    def left(self) -> list[ClaimStatus]:
        return [claim for claim in self.claims if claim.outcome is None]

    def count(self, outcome: str) -> int:
        return sum(claim.outcome == outcome for claim in self.claims)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the slowest kind of hardware is done; None if no estimate is possible."""
        done = [claim for claim in self.claims if claim.outcome == "tuned" and claim.seconds]
        typical_s = statistics.median(claim.seconds or 0.0 for claim in done) if done else None
        paces = [(claim.seconds or 0.0) / claim.estimate_s for claim in done if claim.estimate_s]
        pace = statistics.median(paces) if paces else 1.0
        estimates = []
        for kind in dict.fromkeys(claim.kind for claim in self.left):
            due = [(claim.estimate_s, claim.holder is not None) for claim in self.left if claim.kind == kind]
            hosts = sum(host.present for host in self.hosts if host.kind == kind)
            estimates.append(seconds_left(due, hosts, pace, typical_s))
        finite = [seconds for seconds in estimates if seconds is not None]
        return max(finite, default=0.0) if len(finite) == len(estimates) else None


@dataclass
class FleetPace:
    """Trials a minute over the last minutes."""

    span_s: float = 300.0
    _points: list[tuple[float, int]] = field(default_factory=list)

    def note(self, snapshot: Snapshot) -> None:
        self._points.append((snapshot.seconds, sum(host.trials for host in snapshot.hosts)))
        while len(self._points) > 2 and snapshot.seconds - self._points[1][0] > self.span_s:
            del self._points[0]

    @property
    def per_minute(self) -> float | None:
        (since, first), (now, last) = self._points[0], self._points[-1]
        return (last - first) / (now - since) * 60.0 if now - since > 1.0 else None


Event = dict[str, Any]


def events(before: Snapshot, after: Snapshot) -> list[Event]:
    """Events between two snapshots: hosts first, then claims."""
    return [*_of_hosts(before, after), *_of_claims(before, after)]


def _of_hosts(before: Snapshot, after: Snapshot) -> Iterable[Event]:
    was = {host.id: host for host in before.hosts}
    for host in after.hosts:
        about = {"host": host.name, "kind": host.kind}
        if host.id not in was:
            yield {"event": "host joined", **about, "hardware": host.hardware}
        if not host.present and (host.id not in was or was[host.id].present):
            yield {"event": f"host {host.state}", **about, "note": host.note}


def _of_claims(before: Snapshot, after: Snapshot) -> Iterable[Event]:
    was = {claim.id: claim for claim in before.claims}
    for claim in after.claims:
        about: Event = {"problem": claim.problem, "kind": claim.kind, "conditions": claim.conditions}
        about |= {"after_lost_hosts": claim.lapses} if claim.lapses else {}
        old = was.get(claim.id)
        if claim.holder and (old is None or old.holder != claim.holder):
            yield {"event": "problem begun", **about, "host": claim.host}
        if old and old.outcome is None and claim.failures > old.failures:
            yield {"event": "problem failed", **about, "host": claim.failed_on, "message": claim.message}
        if claim.outcome and (old is None or old.outcome is None):
            seconds = round(claim.seconds, 1) if claim.seconds else None
            yield {"event": f"problem {claim.outcome}", **about, "host": claim.host, "message": claim.message, "took_s": seconds}


def _of_row(kind: type[T], row: Any, **special: Any) -> T:
    """A value with the columns of its fields' names; `special` are fields with other values."""
    names = {entry.name for entry in fields(kind)} - special.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in names}, **special)


def snapshot(hosts: Sequence[Any], claims: Sequence[Any], seconds: float, waiting: int) -> Snapshot:
    """Builds a snapshot from rows of the queue."""
    numbers = ({"age_s": float(row.age_s), "silent_s": float(row.silent_s)} for row in hosts)
    host_states = tuple(
        _of_row(HostStatus, row, hardware=row.hardware["device"], **of_row) for row, of_row in zip(hosts, numbers, strict=True)
    )
    claim_states = tuple(_of_row(ClaimStatus, row, problem=row.problem_key) for row in claims)
    return Snapshot(host_states, claim_states, seconds, waiting)


def seconds_left(due: Sequence[tuple[float | None, bool]], hosts: int, pace: float, default: float | None) -> float | None:
    """Seconds until `hosts` of a kind finish the remaining problems. `due` has (estimate, in work or not) for each problem.
    `pace` is the actual over the estimated time, `default` the time of a problem without an estimate. Problems in work count as
    half done.
    """
    left = [(estimate * pace if estimate else default, working) for estimate, working in due]
    if not hosts or any(seconds is None for seconds, _ in left):
        return None
    finite = [(seconds or 0.0) * (0.5 if working else 1.0) for seconds, working in left]
    return max(sum(finite) / hosts, max(finite, default=0.0))


# Slow hosts: two hosts of one kind should take the same time for the same bulk-synchronous call. Slower hosts are reported.

LIMIT = 0.10


@dataclass(frozen=True)
class Gap:
    """The widest gap between two hosts of a kind, for one problem."""

    kind: str
    problem: str
    slow: str
    fast: str
    slow_us: float
    fast_us: float

    @property
    def ratio(self) -> float:
        return self.slow_us / self.fast_us

    def __str__(self) -> str:
        times = f"{self.slow_us:,.1f} us against {self.fast_us:,.1f} us"
        return f"{self.slow} is {100 * (self.ratio - 1):.0f} % slower than {self.fast} at BSP of {self.problem} ({times})"


def gaps(measured: Iterable[tuple[str, str, str, str, float]]) -> list[Gap]:
    """The pairs of hosts that differ by more than LIMIT, each once with its widest gap, the widest first. `measured` has tuples
    (kind, problem, config, host, microseconds). Only figures of the same config and problem are compared.
    """
    figures: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, problem, config, host, us in measured:
        figures[kind, problem, config][host].append(us)
    widest: dict[tuple[str, str, str], Gap] = {}
    for (kind, problem, _), hosts in figures.items():
        medians = sorted((statistics.median(times), host) for host, times in hosts.items())
        for slow_us, slow in medians:
            fast_us, fast = medians[0]
            gap = Gap(kind, problem, slow, fast, slow_us, fast_us)
            pair = kind, min(slow, fast), max(slow, fast)
            if gap.ratio > 1 + LIMIT and (pair not in widest or gap.ratio > widest[pair].ratio):
                widest[pair] = gap
    return sorted(widest.values(), key=lambda gap: -gap.ratio)
