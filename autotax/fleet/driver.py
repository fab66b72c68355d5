"""The driver, which runs where the command is typed. It lets an engine start workers on hosts, deals out the problems for each
kind of hardware that joins, and watches the fleet. When it ends, even by an error, it ends all workers.
"""

from __future__ import annotations

import heapq
import importlib.util
import math
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from autotax.core.conditions import Conditions
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem
from autotax.db import Store, WinnerRecord
from autotax.db.index import Index
from autotax.db.records import Place, holds, same_devices
from autotax.digests import kernel_digest
from autotax.fleet import messages
from autotax.fleet.messages import ClaimStatus, Engine, EngineOptions, FleetJob, Order, Snapshot
from autotax.fleet.queue import MOST_LAPSES, ClaimQueue, Due, place_of
from autotax.hardware import Hardware
from autotax.software import Environment

ENGINES = {"ray": "ray", "slurm": "submitit"}
"""The Python package that each engine needs."""

POLL_S = 1.0
GRACE_S = 15.0
"""How long workers may take to end in order before they are ended."""
JOINING_S = 300.0
"""Timeout for running workers to report their hardware; afterwards the driver no longer waits for them."""

Jobs = Callable[[Hardware], Sequence[FleetJob]]
"""Gives the problems for a kind of hardware, each with its settings."""


class Screen(Protocol):
    def show(self, snapshot: Snapshot, happened: Sequence[messages.Event]) -> None: ...


@dataclass(frozen=True)
class Won:
    """A winner of the fleet's problems, and the host that proved it."""

    winner: WinnerRecord
    host: str | None


@dataclass(frozen=True)
class FleetOutcome:
    """How a fleet ended."""

    snapshot: Snapshot
    winners: tuple[Won, ...] = ()
    gaps: tuple[messages.Gap, ...] = ()
    interrupted: bool = False
    trouble: str = ""

    @property
    def done(self) -> bool:
        return not (self.interrupted or self.trouble or self.snapshot.left or self.snapshot.count("failed"))


@dataclass
class Driver:
    """`jobs_for` gives the problems of a kind when its first host joins."""

    order: Order
    engine: Engine
    jobs_for: Jobs
    screen: Screen
    poll_s: float = POLL_S
    grace_s: float = GRACE_S
    snapshot: Snapshot = field(default_factory=Snapshot)
    jobs: dict[str, list[FleetJob]] = field(default_factory=dict)
    """All problems of each kind, including those tuned already."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._since = datetime.now(UTC)
        self._notices: list[messages.Event] = []
        self._software: dict[str, Environment] = {}
        self._rows: dict[str, Any] = {}
        self._ended: set[int] = set()
        """Slots whose workers are known to have ended."""
        self._queue = ClaimQueue(self.order.url, self.order.patience_s, self._waiting)

    def run(self) -> FleetOutcome:
        """Runs the fleet until its end. Raises UsageError for errors found before a worker is started."""
        with Store.open(self.order.url):  # creates the tables once, before all hosts would at the same time
            pass
        self._queue.begin(self.order.fleet)
        interrupted, trouble = False, ""
        try:
            slots = self.engine.start(self.order)
            trouble = self._watch(slots)
        except KeyboardInterrupt:
            interrupted = True
        except MachineError as error:
            trouble = str(error)
        finally:
            self._end()
        with self._queue:
            return self._outcome(interrupted, trouble)

    def _watch(self, slots: int) -> str:
        """Watches until nothing is left to do. Returns the reason for an earlier end."""
        while True:
            self._look(slots)
            joining = self._joining(slots)
            # A host may have joined while the problems of another kind were dealt.
            undealt = any(host.present and host.kind not in self.jobs for host in self.snapshot.hosts)
            if self.jobs and not self.snapshot.left and not joining and not undealt:
                return ""
            if not self.engine.running and not any(host.present for host in self.snapshot.hosts):
                return "" if self.jobs and not self.snapshot.left else "no host is left: see the message of each"
            time.sleep(self.poll_s)

    def _joining(self, slots: int) -> bool:
        """Whether there are running workers that have not reported their hardware, which may be a new kind."""
        here = {host.slot for host in self.snapshot.hosts if host.present or host.slot not in self._ended}
        return time.monotonic() - self._began < JOINING_S and len(here) < min(slots, self.engine.running)

    def _look(self, slots: int) -> None:
        for notice in self.engine.watch():
            self._ended.add(notice.slot)
            self._hear(notice.slot, notice.lost, notice.text)
        self._attend(slots)
        if new := [kind for kind in self.snapshot.kinds if kind not in self.jobs]:
            for kind in new:
                self._deal(kind)
            self._attend(slots)  # the dealt problems count as work left
        for claim in self.snapshot.left:
            if reason := self._hopeless(claim):
                self._queue.give_up(claim.id, reason)

    def _attend(self, slots: int) -> None:
        hosts, claims = self._queue.attend(self.order.fleet, self.order.lease_s)
        self._rows = {row.id: row for row in hosts}
        waiting = max(0, slots - len({row.slot for row in hosts}))
        before, seconds = self.snapshot, time.monotonic() - self._began
        self.snapshot = messages.snapshot(hosts, claims, seconds, waiting)
        happened, self._notices = [*self._notices, *messages.events(before, self.snapshot)], []
        self.screen.show(self.snapshot, happened)

    def _hear(self, slot: int, lost: bool, text: str) -> None:
        """A worker ended. The claim of a lost worker is released at once, before its lease ends."""
        if not lost:
            if text.startswith("failed"):
                self._notices.append({"event": "worker failed", "slot": slot, "message": text})
            return
        for host in self.snapshot.hosts:
            if host.slot == slot and host.present:
                self._queue.lose(host.id, text)
        self._notices.append({"event": "worker lost", "slot": slot, "message": text})

    # Dealing out

    def _deal(self, kind: str) -> None:
        """Deals out the problems of a kind whose first host has joined. The driver refuses hosts with other kernels than its own.
        Hosts leave by themselves if their software differs from that of the first host, because winners of one would be stale on
        the other.
        """
        rows = [self._rows[host.id] for host in self.snapshot.hosts if host.kind == kind and host.present]
        mine = kernel_digest()
        for row in (row for row in rows if row.environment["kernels"] != mine):
            note = f"its kernel sources are {row.environment['kernels']}, the driver's {mine}: install the same autotax"
            self._queue.note_host(row.id, "refused", note)
        if not (rows := [row for row in rows if row.environment["kernels"] == mine]):
            return
        first = place_of(rows[0])
        hardware, software = first.hardware, first.environment
        try:
            jobs = list(self.jobs_for(hardware))
        except UsageError as error:
            self._notices.append({"event": "nothing to tune", "kind": kind, "message": str(error)})
            jobs = []
        with Store.open(self.order.url, create=False) as store:
            winners = Index(store.known_winners())
        earlier = [Took(*run) for run in self._queue.earlier_runs()]
        due = deal(jobs, winners, hardware, software, earlier)
        by_size = sorted((entry.job for entry in due), key=lambda job: job.problem.nbytes)
        self._queue.deal(self.order.fleet, kind, due, by_size[len(by_size) // 2] if due else None, software)
        self.jobs[kind], self._software[kind] = jobs, software
        dealt = {"event": "problems dealt", "kind": kind, "hardware": str(hardware), "due": len(due)}
        self._notices.append(dealt | {"tuned_already": len(jobs) - len(due)})

    def _hopeless(self, claim: ClaimStatus) -> str:
        """Why no host will claim a problem any more; empty if one may."""
        if (claim.holder is None or claim.lapsed) and claim.lapses + (claim.holder is not None) >= MOST_LAPSES:
            return f"{MOST_LAPSES} hosts were lost while they tuned it"
        alike = (host for host in self.snapshot.hosts if host.present and host.kind == claim.kind)
        others = [host for host in alike if host.name != claim.failed_on]
        if claim.holder is None and claim.failed_on and not others and not self.snapshot.waiting:
            return claim.message
        return ""

    # The end

    def _end(self) -> None:
        """Ends all workers: in order within GRACE_S, else by force. Another Ctrl-C ends them by force at once."""
        try:
            self._queue.patience_s = min(self._queue.patience_s, self.grace_s)
            self._queue.stop(self.order.fleet)
            until = time.monotonic() + self.grace_s
            while self.snapshot.hosts and time.monotonic() < until:
                self.engine.watch()
                if not self.engine.running:
                    break
                time.sleep(min(0.2, self.poll_s))
        except (KeyboardInterrupt, MachineError):
            pass
        finally:
            self.engine.close()
        with suppress(MachineError):
            self._attend(0)
        with suppress(MachineError):
            self._queue.clear(self.order.fleet)

    def _outcome(self, interrupted: bool, trouble: str) -> FleetOutcome:
        try:
            gaps = messages.gaps([*self._measured()])
            return FleetOutcome(self.snapshot, tuple(self._winners()), tuple(gaps), interrupted, trouble)
        except MachineError as error:
            return FleetOutcome(self.snapshot, (), (), interrupted, trouble or str(error))

    def _winners(self) -> list[Won]:
        """The winners of the requested problems that hold on the hosts of this fleet, in the requested order."""
        with Store.open(self.order.url, create=False) as store:
            stored = store.winners(with_samples=False)
        hosts = self._queue.provers([winner.trial_id for winner in stored])
        winners = []
        for kind, jobs in self.jobs.items():
            software = self._software[kind]
            for job in jobs:
                mine = [
                    winner
                    for winner in stored
                    if (winner.problem, winner.hardware.digest) == (job.problem, kind)
                    and holds(winner, winner.place, job_place(job, winner.hardware, software))
                ]
                winners += [Won(winner, hosts.get(winner.trial_id)) for winner in mine[-1:]]
        return winners

    def _measured(self) -> list[tuple[str, str, str, str, float]]:
        """BSP on each host, from the probes and from the trials of this fleet."""
        figures = [
            (row.kind, problem, "probe", row.name, us)
            for row in self._rows.values()
            for problem, us in row.probes.items()
        ]
        for kind, problem, conditions, config, host, us in self._queue.baselines(self._since):
            deployed = "/".join(str(conditions.get(name)) for name in ("mode", "l2", "skew_us"))
            figures.append((kind, problem, f"{config} {deployed}", host, us))
        return figures

    def _waiting(self, message: str) -> None:
        notice: messages.Event = {"event": "waiting for the database", "message": message}
        self.screen.show(replace(self.snapshot, seconds=time.monotonic() - self._began), [notice])


def new_order(url: str, **options: Any) -> Order:
    """The order of a new fleet."""
    return Order(url=url, fleet=uuid.uuid4().hex, slot=0, **options)


# Scheduling

NEAREST = 3
"""Number of nearest problems from which the time of a new problem is estimated."""

Sizes = Mapping[str, Any]


class Took(NamedTuple):
    """The time of an earlier complete run."""

    key: str
    fields: dict[str, Any]
    """The fields of the problem."""
    kind: str
    seconds: float


def job_place(job: FleetJob, hardware: Hardware, software: Environment) -> Place:
    """The place for which a job is tuned on hosts with this hardware and software."""
    return Place(hardware, software, job.settings.conditions or Conditions.usual(hardware.on_gpu))


def deal(
    jobs: Sequence[FleetJob], winners: Index, hardware: Hardware, software: Environment, earlier: Iterable[Took]
) -> list[Due]:
    """The jobs that are due, in the order in which they are claimed. Jobs that begin anew are always due."""
    estimate = estimator(earlier, hardware.digest)

    def state(job: FleetJob) -> str:
        place = job_place(job, hardware, software)
        stored = [winner for winner in winners.of_problem(job.problem.key) if same_devices(winner.place.hardware, hardware)]
        if job.settings.resume and any(winner.holds(place) for winner in stored):
            return "tuned"
        return "stale" if stored else "new"

    ranked = [(state(job), estimate(job.problem), job) for job in jobs]
    due = [entry for entry in ranked if entry[0] != "tuned"]

    def order(entry: tuple[str, float | None, FleetJob]) -> tuple[bool, float, int, str]:
        name, seconds, job = entry
        return name != "stale", -(seconds or 0.0), -job.problem.nbytes, job.problem.key

    return [Due(job, seconds) for _, seconds, job in sorted(due, key=order)]


def estimator(earlier: Iterable[Took], kind: str) -> Callable[[Problem], float | None]:
    """Estimates the seconds of a problem. It uses the problem's earlier time, if possible on this kind of hardware. Otherwise it
    uses the times of the same operator's problems with the nearest sizes. None if too little is known.
    """
    took: dict[str, dict[str, float]] = {}
    stored: dict[str, dict[str, Sizes]] = {}
    for run in earlier:  # resumed runs are shorter, so the longest counts
        stored.setdefault(run.fields["op"], {}).setdefault(run.key, _sizes(run.fields))
        own = took.setdefault(run.key, {})
        own[run.kind] = max(run.seconds, own.get(run.kind, 0.0))
    seconds = {key: by_kind.get(kind, statistics.median(by_kind.values())) for key, by_kind in took.items()}

    def estimate(problem: Problem) -> float | None:
        if problem.key in seconds:
            return seconds[problem.key]
        sizes = _sizes(problem.to_dict())
        others = stored.get(problem.op, {})
        nearest = heapq.nsmallest(NEAREST, others, key=lambda key: _distance(sizes, others[key]))
        return statistics.median(seconds[key] for key in nearest) if len(nearest) == NEAREST else None

    return estimate


def _sizes(fields: Mapping[str, Any]) -> Sizes:
    return {name: math.log2(value + 1) if isinstance(value, int) else value for name, value in fields.items()}


def _distance(one: Sizes, other: Sizes) -> float:
    """The distance in doublings. Fields that are no sizes count as one doubling if they differ."""
    names = one.keys() | other.keys()
    return sum(_apart(one.get(name), other.get(name)) for name in names)


def _apart(one: object, other: object) -> float:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other)
    return float(one != other)


# Engines

def open_engine(options: EngineOptions) -> Engine:
    """Opens an engine. Raises UsageError if it is unknown or not installed."""
    if options.engine not in ENGINES:
        raise UsageError(f"engine is {options.engine!r}; allowed are {', '.join(ENGINES)}: give one of these as --on")
    package = ENGINES[options.engine]
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"--on {options.engine} needs the Python package {package!r}, which is not installed: "
            f"pip install 'autotax[{options.engine}]' here and on the hosts"
        )
    if options.engine == "ray":
        from autotax.fleet.ray_engine import RayEngine

        return RayEngine(options)
    from autotax.fleet.slurm_engine import SlurmEngine

    return SlurmEngine(options)
