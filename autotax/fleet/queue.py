"""The queue where workers claim problems: one claim for each problem and kind of hardware, in a PostgreSQL database.

A claim is a row with a holder and an expiry time, which the holder renews while it works. `FOR UPDATE SKIP LOCKED` gives each row
to one of many concurrent workers, and none waits. All times are from the database's clock. After a restart of the server, every
claim gets a whole lease, because no worker could renew its claim during the restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self, TypeVar

import msgspec
from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    DateTime,
    Engine,
    Float,
    Index,
    Row,
    String,
    Text,
    UniqueConstraint,
    case,
    create_engine,
    delete,
    func,
    insert,
    make_url,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autotax.core.decoding import Malformed, Name, Positive, converted, reason
from autotax.core.errors import MachineError, UsageError
from autotax.core.settings import Settings
from autotax.db import formats
from autotax.db.connection import opening
from autotax.db.schema import PREFIX, ProblemRow, RunRow, TrialRow
from autotax.db.url import resolve_url, shown, without_secrets
from autotax.fleet.messages import PATIENCE_S, PRESENT, Claim, FleetJob, HostHello
from autotax.operators.problem_files import problem_of
from autotax.software import Environment

# Tables of a fleet: its command, its hosts, its claims. Measurements go to the tables of `autotax.db`, which outlive the fleet.

Id = String(32)


class FleetBase(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSON(none_as_null=True),
        dict[str, float]: JSON(none_as_null=True),
    }


class FleetRow(FleetBase):
    """One running command. `heard` is the time of the driver's last sign of life, by the clock of the database."""

    __tablename__ = f"{PREFIX}fleet"

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    stopped: Mapped[bool] = mapped_column(default=False)
    dealt: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Kinds of hardware that have problems, each with the job whose BSP all its hosts measure, and their software."""
    began: Mapped[datetime] = mapped_column(server_default=func.now())
    heard: Mapped[datetime] = mapped_column(server_default=func.now())


class HostRow(FleetBase):
    """One worker, from its start to its end. A restarted worker is a new row."""

    __tablename__ = f"{PREFIX}fleet_host"

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    fleet: Mapped[str] = mapped_column(Id, index=True)
    slot: Mapped[int]
    """The host's place in the engine."""
    name: Mapped[str] = mapped_column(String(200))
    kind: Mapped[str] = mapped_column(String(16))
    """Digest of its hardware."""
    hardware: Mapped[dict[str, Any]]
    environment: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))
    note: Mapped[str] = mapped_column(Text, default="")
    claim: Mapped[int | None]
    done: Mapped[int] = mapped_column(default=0)
    total: Mapped[int] = mapped_column("wanted", key="total", default=0)
    trials: Mapped[int] = mapped_column(default=0)
    """Number of trials that it has measured for this fleet."""
    busy_s: Mapped[float] = mapped_column(Float, default=0.0)
    probes: Mapped[dict[str, float]] = mapped_column(default=dict)
    """Microseconds of BSP, by the problem that all hosts of a kind measure first."""
    joined: Mapped[datetime] = mapped_column(server_default=func.now())
    heard: Mapped[datetime] = mapped_column(server_default=func.now())


class ClaimRow(FleetBase):
    """A problem that is due on a kind of hardware. At most one worker holds it, until `expires` by the clock of the database."""

    __tablename__ = f"{PREFIX}fleet_claim"
    __table_args__ = (
        UniqueConstraint("problem_key", "kind", "conditions", name="uq_autotax_fleet_claim"),
        Index("ix_autotax_fleet_claim_order", "fleet", "kind", "place"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_key: Mapped[str] = mapped_column(String(200))
    kind: Mapped[str] = mapped_column(String(16))
    conditions: Mapped[str] = mapped_column(String(64))
    fleet: Mapped[str] = mapped_column(Id)
    """The command that last dealt out the problem."""
    place: Mapped[int]
    """The claim with the lowest place is claimed first."""
    job: Mapped[dict[str, Any]]
    """The problem and the settings."""
    estimate_s: Mapped[float | None]
    holder: Mapped[str | None] = mapped_column(Id, index=True)
    host: Mapped[str | None] = mapped_column(String(200))
    """Name of the host that holds it, or held it last."""
    expires: Mapped[datetime | None]
    lapses: Mapped[int] = mapped_column(default=0)
    """Number of hosts that were lost while they held the claim."""
    failures: Mapped[int] = mapped_column(default=0)
    failed_on: Mapped[str | None] = mapped_column(String(200))
    outcome: Mapped[str | None] = mapped_column(String(16))
    """`tuned` or `failed`; None as long as it is due."""
    message: Mapped[str] = mapped_column("told", Text, key="message", default="")
    seconds: Mapped[float | None]


# Reads rows of a fleet. The rows may have been edited, so each JSON column is read as a declared type, or raises Malformed.

class _SettingsShape(msgspec.Struct):
    trials: int
    timeout_s: float | None
    sampler: Name | None
    seed: int
    resume: bool
    variants: list[Name] | None
    conditions: formats.ConditionsShape | None
    soak: int | None
    ends_below: float | None = None
    paired: bool = False


class _JobShape(msgspec.Struct):
    problem: dict[str, Any]
    settings: _SettingsShape


class _DealtShape(msgspec.Struct):
    probe: dict[str, Any] | None
    software: formats.EnvironmentShape | None  # type: ignore[valid-type]


def job_of(values: object) -> FleetJob:
    """The inverse of `FleetJob.to_dict`. Raises Malformed."""
    checked = converted(values, _JobShape)
    try:
        return FleetJob(problem_of(checked.problem), Settings.from_dict(msgspec.to_builtins(checked.settings)))
    except UsageError as error:
        raise Malformed(reason(error)) from None


def place_of(row: Any) -> HostHello:
    """Hardware and software of a host. Raises Malformed."""
    return HostHello(formats.hardware_of(row.hardware), formats.environment_of(row.environment))


def dealt_of(values: object, kind: str) -> tuple[FleetJob | None, Environment | None] | None:
    """The first measurement of all hosts of a kind, and their software; None if nothing was dealt to them. Raises Malformed."""
    checked: _DealtShape | None = converted(values, dict[str, _DealtShape]).get(kind)
    if checked is None:
        return None
    software = formats.environment_of(checked.software) if checked.software else None
    return job_of(checked.probe) if checked.probe else None, software


def run_of(key: object, fields: object, kind: object, accounts: object) -> tuple[str, dict[str, Any], str, float] | None:
    """The time of an earlier run as (problem, its fields, kind, seconds); None if the run has no time. Raises Malformed."""
    seconds = converted(accounts, dict[str, float]).get("seconds")
    run = converted(key, str), problem_of(fields).to_dict(), converted(kind, str)
    return (*run, seconds) if seconds else None


# Queue

MOST_LAPSES = 3
"""A problem with which this many hosts were lost is given up, because it may kill hosts."""
MOST_FAILURES = 2
"""A problem that failed on this many hosts is given up. A single failure may be the fault of the host."""
CONNECT_S = 5
_KEEPALIVE = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 4}
"""With these settings a vanished server is noticed within 35 s."""
_LOCK = 0x666C656574  # "fleet" in ASCII

T = TypeVar("T")


@dataclass(frozen=True)
class Due:
    """A problem to be dealt out, with its estimated time."""

    job: FleetJob
    estimate_s: float | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The answer to a heartbeat of a worker."""

    going: bool
    """Whether the fleet still wants this worker."""
    held: bool
    """Whether the claim is still the worker's."""
    dealt: bool
    """Whether the problems of its kind are dealt out."""
    probe: FleetJob | None = None
    """The first measurement on every host of this kind."""
    software: Environment | None = None
    """The software that every host of this kind must have."""


class ClaimQueue:
    """One connection of a worker or a driver. Every call waits `patience_s` for a database that does not answer, then raises
    MachineError. `on_wait` is called between attempts; an exception from it ends the wait.
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S, on_wait: Callable[[str], None] | None = None) -> None:
        self.url = url
        self.patience_s = patience_s
        self._on_wait = on_wait or (lambda _: None)
        self.engine = _engine(url)

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The driver's side

    def begin(self, fleet: str) -> None:
        """Creates missing tables and stores the begin of a fleet. Raises UsageError for a database that cannot be used."""
        with opening(self.url), self.engine.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
            FleetBase.metadata.create_all(connection)
            connection.execute(insert(FleetRow).values(id=fleet))

    def deal(
        self, fleet: str, kind: str, due: Sequence[Due], probe: FleetJob | None = None, software: Environment | None = None
    ) -> None:
        """Deals out problems in this order. Claims that workers of other fleets hold stay, and their outcome counts here."""
        rows = [
            {
                "problem_key": entry.job.problem.key,
                "kind": kind,
                "conditions": _conditions(entry.job),
                "fleet": fleet,
                "place": place,
                "job": entry.job.to_dict(),
                "estimate_s": entry.estimate_s,
            }
            for place, entry in enumerate(due)
        ]
        insertion = postgresql.insert(ClaimRow)
        live = ClaimRow.outcome.is_(None) & (ClaimRow.expires > func.now())
        anew = insertion.on_conflict_do_update(
            constraint="uq_autotax_fleet_claim",
            set_={name: getattr(insertion.excluded, name) for name in ("fleet", "place", "job", "estimate_s")}
            | {"lapses": 0, "failures": 0, "failed_on": None, "outcome": None, "message": "", "seconds": None}
            | {"holder": _if(live, ClaimRow.holder), "expires": _if(live, ClaimRow.expires), "host": _if(live, ClaimRow.host)},
        )

        def act(connection: Connection) -> None:
            if rows:
                connection.execute(anew, rows)
            dealt = connection.scalar(select(FleetRow.dealt).where(FleetRow.id == fleet).with_for_update())
            for_all = {"probe": probe and probe.to_dict(), "software": software and software.to_dict()}
            now = converted(dealt or {}, dict[str, Any]) | {kind: for_all}
            connection.execute(update(FleetRow).where(FleetRow.id == fleet).values(dealt=now))

        self._do(act)

    def attend(self, fleet: str, lease_s: float) -> tuple[list[Row[Any]], list[Row[Any]]]:
        """Stores a sign of life of the driver. Returns the hosts of its fleet, and the claims, `lapsed` if nobody renews them."""

        def act(connection: Connection) -> tuple[list[Row[Any]], list[Row[Any]]]:
            connection.execute(update(FleetRow).where(FleetRow.id == fleet).values(heard=func.now()))
            silent = func.extract("epoch", func.now() - HostRow.heard).label("silent_s")
            age = func.extract("epoch", func.now() - HostRow.joined).label("age_s")
            hosts = select(*HostRow.__table__.columns, silent, age).where(HostRow.fleet == fleet)
            hosts = hosts.order_by(HostRow.slot, HostRow.joined)
            columns = [column for column in ClaimRow.__table__.columns if column.name != "job"]
            lapsed = func.coalesce(_lapsed(lease_s), False).label("lapsed")
            claims = select(*columns, lapsed).where(ClaimRow.fleet == fleet).order_by(ClaimRow.kind, ClaimRow.place)
            host_rows: list[Row[Any]] = list(connection.execute(hosts))
            for row in host_rows:  # checks the columns that the driver and its screen read
                place_of(row), converted(row.probes, dict[str, Positive])
            return host_rows, list(connection.execute(claims))

        return self._do(act)

    def note_host(self, host: str, state: str, note: str) -> None:
        """Refuses a host, or notes that it is lost."""
        self._do(lambda c: c.execute(update(HostRow).where(HostRow.id == host).values(state=state, note=note, claim=None)))

    def lose(self, host: str, note: str) -> None:
        """Frees the claim of a dead worker at once."""

        def act(connection: Connection) -> None:
            free = update(ClaimRow).where(ClaimRow.holder == host, ClaimRow.outcome.is_(None))
            connection.execute(free.values(holder=None, expires=None, lapses=ClaimRow.lapses + 1))
            gone = update(HostRow).where(HostRow.id == host, HostRow.state.in_(PRESENT))
            connection.execute(gone.values(state="lost", note=note, claim=None))

        self._do(act)

    def give_up(self, claim: int, reason: str) -> None:
        """Marks a problem as failed; no worker claims it again."""
        self._do(
            lambda c: c.execute(
                update(ClaimRow).where(ClaimRow.id == claim, ClaimRow.outcome.is_(None)).values(outcome="failed", message=reason)
            )
        )

    def stop(self, fleet: str) -> None:
        """Asks all workers to end."""
        self._do(lambda c: c.execute(update(FleetRow).where(FleetRow.id == fleet).values(stopped=True)))

    def clear(self, fleet: str) -> None:
        """Cleans up after all workers of a fleet have ended: frees their claims and cancels unresolved problems."""

        def act(connection: Connection) -> None:
            ours = select(HostRow.id).where(HostRow.fleet == fleet)
            open_ = ClaimRow.outcome.is_(None)
            connection.execute(update(ClaimRow).where(ClaimRow.holder.in_(ours), open_).values(holder=None, expires=None))
            connection.execute(delete(ClaimRow).where(ClaimRow.fleet == fleet, open_))

        self._do(act)

    def baselines(self, since: datetime) -> list[Sequence[Any]]:
        """Verified trials of BSP with the host that measured them: (kind, problem, conditions, config, host, latency)."""
        host = RunRow.settings["host"].as_string()
        config = TrialRow.conditions, TrialRow.config_digest
        query = (
            select(RunRow.hardware_digest, RunRow.problem_key, *config, host, TrialRow.latency_us)
            .join(TrialRow.run)
            .where(TrialRow.variant == "bsp", TrialRow.status == "ok", host.is_not(None), RunRow.started_at >= since)
        )
        return self._do(lambda c: [(*row[:2], converted(row[2], dict[str, Any]), *row[3:]) for row in c.execute(query)])

    def provers(self, trials: Sequence[int]) -> dict[int, str]:
        """The hosts that measured these trials, if their runs have stored it."""
        host = RunRow.settings["host"].as_string()
        query = select(TrialRow.id, host).join(TrialRow.run).where(TrialRow.id.in_(trials), host.is_not(None))
        return self._do(lambda c: {row.id: row[1] for row in c.execute(query)})

    def earlier_runs(self) -> list[tuple[str, dict[str, Any], str, float]]:
        """The times of complete runs as (problem, its fields, kind, seconds)."""
        columns = RunRow.problem_key, ProblemRow.fields, RunRow.hardware_digest, RunRow.accounts
        query = select(*columns).join(RunRow.problem).where(RunRow.status == "done", RunRow.accounts.is_not(None))
        return self._do(lambda c: [run for row in c.execute(query) if (run := run_of(*row))])

    # A worker's side

    def join(self, host: str, fleet: str, slot: int, name: str, place: HostHello) -> None:
        values = {"slot": slot, "name": name, "kind": place.hardware.digest}
        values |= {"hardware": place.hardware.to_dict(), "environment": place.environment.to_dict()}
        self._do(lambda c: c.execute(insert(HostRow).values(id=host, fleet=fleet, state="idle", **values)))

    def take(self, host: str, fleet: str, kind: str, name: str, lease_s: float) -> Claim | None:
        """Claims the first problem of this kind that is free or whose holder was lost; None if there is none now."""
        ready = or_(ClaimRow.holder.is_(None), _lapsed(lease_s))
        free = (
            select(ClaimRow)
            .where(ClaimRow.fleet == fleet, ClaimRow.kind == kind, ClaimRow.outcome.is_(None), ready)
            .where(ClaimRow.lapses + case((ClaimRow.holder.is_(None), 0), else_=1) < MOST_LAPSES)
            .where(ClaimRow.failed_on.is_distinct_from(name))
            .order_by(ClaimRow.place)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        # The answer of an earlier commit may have been lost although the problem was claimed.
        mine = select(ClaimRow).where(ClaimRow.holder == host, ClaimRow.outcome.is_(None)).limit(1)

        def act(connection: Connection) -> Claim | None:
            row = connection.execute(mine).first() or connection.execute(free).first()
            if row is None:
                return None
            lapsed = row.holder is not None and row.holder != host
            values = {"holder": host, "host": name, "expires": _from_now(lease_s), "lapses": row.lapses + lapsed}
            connection.execute(update(ClaimRow).where(ClaimRow.id == row.id).values(**values))
            connection.execute(update(HostRow).where(HostRow.id == host).values(state="working", claim=row.id))
            begun = row.host is not None
            return Claim(row.id, job_of(row.job), begun)

        return self._do(act)

    def beat(self, host: str, fleet: str, claim: int | None, lease_s: float, gone_s: float, **progress: Any) -> Heartbeat:
        """Stores a heartbeat of a worker with its progress, and renews its claim."""

        def act(connection: Connection) -> Heartbeat:
            here = update(HostRow).where(HostRow.id == host, HostRow.state.in_(PRESENT))
            kind = connection.scalar(here.values(heard=func.now(), **progress).returning(HostRow.kind))
            held = claim is None or self._held(connection, host, claim, expires=_from_now(lease_s))
            alone = (FleetRow.heard < _from_now(-gone_s)) & _server_is_older_than(gone_s)
            row = connection.execute(select(FleetRow.stopped, FleetRow.dealt, alone).where(FleetRow.id == fleet)).first()
            if kind is None or row is None or row[0] or row[2]:
                return Heartbeat(False, held, False)
            for_all = dealt_of(row[1], kind)
            return Heartbeat(True, held, True, *for_all) if for_all else Heartbeat(True, held, False)

        return self._do(act)

    def left(self, fleet: str, kind: str) -> int:
        """The number of unresolved problems of a kind."""
        query = select(func.count()).where(ClaimRow.fleet == fleet, ClaimRow.kind == kind, ClaimRow.outcome.is_(None))
        return self._do(lambda c: c.scalar(query)) or 0

    def finish(self, host: str, claim: int, outcome: str, reason: str, seconds: float) -> bool:
        """Resolves a problem; False if the worker no longer holds it."""
        values = {"outcome": outcome, "message": reason[:1000], "seconds": seconds, "holder": None, "expires": None}
        return self._do(lambda c: self._held(c, host, claim, **values))

    def fail(self, host: str, claim: int, name: str, reason: str, seconds: float) -> bool:
        """Stores that a problem failed on a host. Another host tries it, or it is given up."""

        def act(connection: Connection) -> bool:
            failures = connection.scalar(select(ClaimRow.failures).where(ClaimRow.id == claim)) or 0
            outcome = "failed" if failures + 1 >= MOST_FAILURES else None
            values = {"failures": failures + 1, "failed_on": name, "message": reason[:1000], "seconds": seconds}
            return self._held(connection, host, claim, outcome=outcome, holder=None, expires=None, **values)

        return self._do(act)

    def release(self, host: str, claim: int) -> None:
        """Gives back an unfinished claim, so that another worker can go on at once."""
        self._do(lambda c: self._held(c, host, claim, holder=None, expires=None))

    def leave(self, host: str, state: str, note: str = "", **progress: Any) -> None:
        here = update(HostRow).where(HostRow.id == host, HostRow.state.in_(PRESENT))
        self._do(lambda c: c.execute(here.values(state=state, note=note, claim=None, heard=func.now(), **progress)))

    @staticmethod
    def _held(connection: Connection, host: str, claim: int, **values: Any) -> bool:
        mine = update(ClaimRow).where(ClaimRow.id == claim, ClaimRow.holder == host, ClaimRow.outcome.is_(None))
        return connection.execute(mine.values(**values)).rowcount == 1

    def _do(self, work: Callable[[Connection], T]) -> T:
        """Runs one transaction, again while the database is unreachable. Raises MachineError, also for a malformed row."""
        until, pause_s = time.monotonic() + self.patience_s, 0.2
        while True:
            try:
                with self.engine.begin() as connection:
                    return work(connection)
            except Malformed as error:
                message = f"database {shown(self.url)} holds a row of a fleet that is malformed ({error})"
                raise MachineError(f"{message}: mend or remove it, then run the same command again") from None
            except (OperationalError, InterfaceError, DBAPIError) as error:
                if not isinstance(error, OperationalError | InterfaceError) and not error.connection_invalidated:
                    raise
                message = " ".join(without_secrets(self.url, str(error.orig)).split())[:200]
                if time.monotonic() > until:
                    waited = f"database {shown(self.url)} has not answered for {self.patience_s:.0f} s"
                    raise MachineError(f"{waited} ({message}): start it, then run the same command again") from error
                self._on_wait(message)
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 3.0)


def server_url(db: str | None) -> str:
    """The resolved URL of a database that many hosts can write to. Raises UsageError for any other."""
    url = resolve_url(db)
    if make_url(url).get_backend_name() != "postgresql":
        raise UsageError(
            f"database is {shown(url)}; a fleet needs a PostgreSQL server that all hosts reach: "
            "give --db postgresql+psycopg://USER@HOST/NAME"
        )
    return url


def _engine(url: str) -> Engine:
    arguments: dict[str, Any] = {}
    if make_url(url).get_dialect().driver.startswith("psycopg"):
        arguments = {"connect_timeout": CONNECT_S, "application_name": "autotax fleet", **_KEEPALIVE}
    return create_engine(url, pool_size=1, max_overflow=0, connect_args=arguments)


def _conditions(job: FleetJob) -> str:
    return job.settings.conditions.key if job.settings.conditions else ""


def _from_now(seconds: float) -> ColumnElement[datetime]:
    return func.now() + func.make_interval(0, 0, 0, 0, 0, 0, seconds)


def _lapsed(lease_s: float) -> ColumnElement[bool]:
    return (ClaimRow.expires < func.now()) & _server_is_older_than(lease_s)


def _server_is_older_than(seconds: float) -> ColumnElement[bool]:
    return func.pg_postmaster_start_time() < _from_now(-seconds)


def _if(condition: ColumnElement[bool], value: Any) -> ColumnElement[Any]:
    return case((condition, value), else_=None)
