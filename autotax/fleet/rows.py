"""The tables of a fleet: its command, its hosts, its claims. They are made when a fleet first uses a database, and hold nothing
that outlives a fleet: what was measured is kept in the tables of `autotax.db.schema`, as always.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import JSON, DateTime, Float, Index, String, Text, UniqueConstraint, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autotax.core.errors import UsageError
from autotax.core.settings import Settings
from autotax.core.validation import Malformed, Name, Positive, converted, problem_of, reason
from autotax.db import file_format
from autotax.db.schema import PREFIX
from autotax.fleet.messages import FleetJob, HostHello
from autotax.software import Environment

Id = String(32)


class FleetBase(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSON(none_as_null=True),
        dict[str, float]: JSON(none_as_null=True),
    }


class FleetRow(FleetBase):
    """One command, as long as it runs. `heard` is when the driver was last there, by the clock of the database."""

    __tablename__ = f"{PREFIX}fleet"

    id: Mapped[str] = mapped_column(Id, primary_key=True)
    stopped: Mapped[bool] = mapped_column(default=False)
    dealt: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Kinds of hardware whose problems are dealt out, each with the job whose BSP all its hosts measure, and their software."""
    began: Mapped[datetime] = mapped_column(server_default=func.now())
    heard: Mapped[datetime] = mapped_column(server_default=func.now())


class HostRow(FleetBase):
    """One worker, from its start to its end. A worker that starts again is another one."""

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
    wanted: Mapped[int] = mapped_column(default=0)
    trials: Mapped[int] = mapped_column(default=0)
    """All that it has measured for this fleet."""
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
    """The command that dealt it last."""
    place: Mapped[int]
    """The lowest is claimed first."""
    job: Mapped[dict[str, Any]]
    """The problem and the settings."""
    estimate_s: Mapped[float | None]
    holder: Mapped[str | None] = mapped_column(Id, index=True)
    host: Mapped[str | None] = mapped_column(String(200))
    """Name of the host that holds it, or held it last."""
    expires: Mapped[datetime | None]
    lapses: Mapped[int] = mapped_column(default=0)
    """Hosts that were lost while they held it."""
    failures: Mapped[int] = mapped_column(default=0)
    failed_on: Mapped[str | None] = mapped_column(String(200))
    outcome: Mapped[str | None] = mapped_column(String(16))
    """`tuned` or `failed`; None as long as it is due."""
    told: Mapped[str] = mapped_column(Text, default="")
    seconds: Mapped[float | None]


# READING rows of a fleet: anybody may have edited them, so each JSON column is read as a declared type, or is Malformed.

class _SettingsShape(msgspec.Struct):
    trials: int
    timeout_s: float | None
    sampler: Name | None
    seed: int
    resume: bool
    variants: list[Name] | None
    conditions: file_format.ConditionsShape | None
    soak: int | None
    ends_below: float | None = None
    paired: bool = False


class _JobShape(msgspec.Struct):
    problem: dict[str, Any]
    settings: _SettingsShape


class _DealtShape(msgspec.Struct):
    probe: dict[str, Any] | None
    software: file_format.EnvironmentShape | None  # type: ignore[valid-type]


def job_of(values: object) -> FleetJob:
    """The inverse of `FleetJob.to_dict`. Raises Malformed."""
    found = converted(values, _JobShape)
    try:
        return FleetJob(problem_of(found.problem), Settings.from_dict(msgspec.to_builtins(found.settings)))
    except UsageError as error:
        raise Malformed(reason(error)) from None


def place_of(row: Any) -> HostHello:
    """Hardware and software of a host. Raises Malformed."""
    hardware = file_format.hardware_of(converted(row.hardware, file_format.HardwareShape))
    return HostHello(hardware, file_format.environment_of(converted(row.environment, file_format.EnvironmentShape)))


def probes_of(row: Any) -> dict[str, float]:
    """Microseconds of BSP on a host, by problem. Raises Malformed."""
    found: dict[str, float] = converted(row.probes, dict[str, Positive])
    return found


def dealt_of(values: object, kind: str) -> tuple[FleetJob | None, Environment | None] | None:
    """What all hosts of a kind measure first, and their software; None if nothing was dealt to them. Raises Malformed."""
    found: _DealtShape | None = converted(values, dict[str, _DealtShape]).get(kind)
    if found is None:
        return None
    software = file_format.environment_of(found.software) if found.software else None
    return job_of(found.probe) if found.probe else None, software


def run_of(key: object, fields: object, kind: object, accounts: object) -> tuple[str, dict[str, Any], str, float] | None:
    """How long an earlier run took: (problem, its fields, kind, seconds); None if it does not say. Raises Malformed."""
    seconds = converted(accounts, dict[str, float]).get("seconds")
    told = converted(key, str), problem_of(fields).to_dict(), converted(kind, str)
    return (*told, seconds) if seconds else None
