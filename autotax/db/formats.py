"""Records as rows of the database and as shared files. Fields, types and sizes are checked on reading."""

from __future__ import annotations

import getpass
import json
import math
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import sqlalchemy
from sqlalchemy import BigInteger, String, Text, cast, select, type_coerce
from sqlalchemy.orm import Session

from autotax.core.conditions import LONGEST_SKEW_US, MODES, Conditions
from autotax.core.decoding import (
    LARGEST,
    LONGEST_NAME,
    PLAIN,
    ConfigShape,
    Integer,
    Malformed,
    Name,
    Positive,
    Sample,
    SampleLists,
    Small,
    converted,
    from_json,
    reason,
)
from autotax.core.errors import UsageError
from autotax.core.files import read_bytes, write_whole
from autotax.core.problem import Problem
from autotax.core.settings import RUN_STATUSES, TRIAL_STATUSES
from autotax.db.index import IndexedWinner
from autotax.db.records import Entry, MissRecord, Place, RunRecord, TrialRecord, WinnerRecord
from autotax.db.schema import (
    CURRENT,
    Base,
    Digest,
    EnvironmentRow,
    HardwareRow,
    MissRow,
    ProblemRow,
    RunRow,
    TrialRow,
    WinnerRow,
)
from autotax.hardware import BACKENDS, Hardware
from autotax.operators import problem_files
from autotax.software import Environment

T = TypeVar("T")


def _shape(record: type[Hardware | Environment], row: type[Base], **special: Any) -> type[msgspec.Struct]:
    """The fields of a record, each with the type and the bounds of its column."""

    def kind(name: str) -> Any:
        column = row.__table__.columns[name].type
        if isinstance(column, String):
            return Annotated[str, msgspec.Meta(max_length=column.length or 1000, pattern=PLAIN)]
        return Integer if isinstance(column, BigInteger) else Small

    field_types = [(field.name, special.get(field.name) or kind(field.name)) for field in fields(record)]
    return msgspec.defstruct(record.__name__, field_types, forbid_unknown_fields=True, frozen=True)


HardwareShape = _shape(Hardware, HardwareRow, backend=Literal[BACKENDS])
EnvironmentShape = _shape(Environment, EnvironmentRow)
YEARS = 2000, 2999
"""The years of a winner. At both ends of the calendar no other time zone can tell the moment."""
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class ConditionsShape(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    mode: str
    l2: str
    skew_us: float


CodeDigest = Annotated[str, msgspec.Meta(max_length=Digest.length, pattern=PLAIN)]


class EntryShape(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `Entry.to_dict`."""

    problem: dict[str, Any]
    hardware: HardwareShape  # type: ignore[valid-type]
    environment: EnvironmentShape  # type: ignore[valid-type]
    kernel_digest: CodeDigest
    conditions: ConditionsShape
    config: ConfigShape
    baseline: ConfigShape
    latency_us: Positive
    baseline_us: Positive
    speedup: Positive
    interval: tuple[Positive, Positive]
    tie: bool
    verified: bool
    samples: dict[Name, SampleLists] | None
    tuned_at: Moment
    tuned_by: Name | None
    machine_code: CodeDigest | None = None


def decoded(row: object, shape: Any) -> Any:
    """Decodes a row, or one of its JSON columns, as a value of this type. Raises Malformed: databases get edited."""
    return converted(row, shape, attributes=True)


def hardware_of(values: object) -> Hardware:
    """The hardware of a row, or of plain values. Raises Malformed."""
    return Hardware(**msgspec.structs.asdict(decoded(values, HardwareShape)))


def environment_of(values: object) -> Environment:
    """The software of a row, or of plain values. Raises Malformed."""
    return Environment(**msgspec.structs.asdict(decoded(values, EnvironmentShape)))


def entry_from_json(text: msgspec.Raw) -> Entry:
    """The inverse of `Entry.to_dict`, from JSON. Raises Malformed or UsageError."""
    shape = from_json(text, EntryShape)
    if not shape.verified:
        raise Malformed("it is not verified")
    if shape.interval[0] > shape.interval[1]:
        raise Malformed("interval is not two numbers, the lower one first")
    conditions = Conditions(**msgspec.structs.asdict(shape.conditions))
    if conditions.skew_us != shape.conditions.skew_us:
        raise Malformed("conditions.skew_us has more digits than are kept")
    if not YEARS[0] <= shape.tuned_at.year <= YEARS[1]:
        raise Malformed(f"tuned_at is {shape.tuned_at.isoformat()}; it must be in the years {YEARS[0]} to {YEARS[1]}")
    winner = WinnerRecord(
        problem=problem_files.problem_of(shape.problem),
        hardware=Hardware(**msgspec.structs.asdict(shape.hardware)),
        environment=Environment(**msgspec.structs.asdict(shape.environment)),
        conditions=conditions,
        trial_id=0,
        config=shape.config.config,
        kernel_digest=CURRENT.get(shape.kernel_digest, shape.kernel_digest),
        baseline=shape.baseline.config,
        latency_us=shape.latency_us,
        baseline_us=shape.baseline_us,
        speedup=shape.speedup,
        interval_low=shape.interval[0],
        interval_high=shape.interval[1],
        tie=shape.tie,
        verified=True,
        samples=shape.samples,
        created_at=shape.tuned_at,
        machine_code=shape.machine_code,
    )
    return Entry(winner, shape.tuned_by)


# Shared files of winners. A file is one JSON document with each winner's author, time, hardware, software and samples.

FORMAT, VERSION = "autotax winners", 2


def me() -> str:
    """user@host"""
    try:
        return f"{getpass.getuser()}@{platform.node()}"
    except (KeyError, OSError):  # a user without a name, as in many containers
        return f"unknown@{platform.node()}"


def write(path: Path, entries: Iterable[Entry], *, anonymous: bool = False) -> None:
    """Writes entries to a file, whole or not at all. Entries without an author get this user as their author."""
    by = None if anonymous else me()
    signed = [replace(entry, by=None if anonymous else entry.by or by) for entry in entries]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "exported_by": by,
        "winners": [entry.to_dict() for entry in signed],
    }
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> list[Entry]:
    """The entries of a file, perhaps compressed by gzip or xz. Raises UsageError, of one line, if any part is invalid."""
    document = _document(path, dict[str, msgspec.Raw])
    if _field(document, "format") != FORMAT:
        _refuse(path, "is not an export of autotax")
    if (version := _field(document, "version")) != VERSION or type(version) is not int:
        complaint = f"is of version {str(version)[:20]!r}, this autotax reads version {VERSION}"
        _refuse(path, complaint, "export with the autotax that knows both, or ")
    try:
        winners = from_json(document.get("winners", b"null"), list[msgspec.Raw])
    except Malformed:
        _refuse(path, "has no list of winners")
    return [_entry(path, number, text) for number, text in enumerate(winners, 1)]


def _document(path: Path, shape: type[T]) -> T:
    try:
        return from_json(read_bytes(path), shape)
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})")
    except Malformed as error:
        _refuse(path, f"is no export of autotax ({error})")


def _field(document: dict[str, msgspec.Raw], name: str) -> Any:
    try:
        return from_json(document.get(name, b"null"), str | int | None)  # type: ignore[arg-type]
    except Malformed:
        return None


def _entry(path: Path, number: int, text: msgspec.Raw) -> Entry:
    try:
        return entry_from_json(text)
    except (Malformed, UsageError) as error:
        _refuse(path, f"is malformed at winner {number}: {reason(error)}")


def _refuse(path: Path, what: str, remedy: str = "") -> NoReturn:
    raise UsageError(f"file {path} {' '.join(what.split())}; nothing was taken from it: {remedy}give a file of `autotax export`")


# Rows of the database and records, so that no row leaves the store.

def problem_row(problem: Problem) -> ProblemRow:
    return ProblemRow(key=problem.key, op=problem.op, fields=problem.to_dict())


def hardware_row(hardware: Hardware) -> HardwareRow:
    return HardwareRow(digest=hardware.digest, **hardware.to_dict())


def environment_row(environment: Environment) -> EnvironmentRow:
    return EnvironmentRow(digest=environment.digest, **environment.to_dict())


def trial_row(run_id: int, trial: TrialRecord, kernel_digest: str) -> TrialRow:
    # An output that was never written has an error of NaN. SQLite would store NaN as NULL, which means "not compared".
    unreadable = trial.relative_error is not None and math.isnan(trial.relative_error)
    alike = ("number", "status", "latency_us", "samples", "slowest_rank", "compile_s", "verified", "conditions")
    return TrialRow(
        run_id=run_id,
        variant=trial.config.variant,
        config=trial.config.to_dict(),
        config_digest=trial.config.digest,
        kernel_digest=kernel_digest,
        relative_error=math.inf if unreadable else trial.relative_error,
        error=trial.error and storable(trial.error),
        **{name: getattr(trial, name) for name in alike},
    )


def storable(text: str) -> str:
    """Makes a text storable: a compiler or a dying rank may print any bytes, but databases refuse NUL and invalid UTF-8."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def winner_row(winner: WinnerRecord) -> WinnerRow:
    alike = ("kernel_digest", "comm", "trial_id", "latency_us", "baseline_us", "speedup", "interval_low", "interval_high", "tie")
    return WinnerRow(
        problem_key=winner.problem.key,
        hardware_digest=winner.hardware.digest,
        world_size=winner.problem.world_size,
        conditions=winner.conditions.key,
        triton=winner.environment.triton,
        environment_digest=winner.environment.digest,
        config=winner.config.to_dict(),
        baseline=winner.baseline.to_dict(),
        created_at=winner.created_at or datetime.now(UTC),
        **{name: getattr(winner, name) for name in (*alike, "verified", "samples")},
    )


def miss_row(miss: MissRecord) -> MissRow:
    return MissRow(
        problem_key=miss.problem.key,
        hardware_digest=miss.hardware.digest,
        conditions=miss.conditions.key,
        count=miss.count,
        last_asked=miss.last_asked,
    )


def problem_of(row: ProblemRow) -> Problem:
    """The problem of a row; its key must be the key of the row."""
    problem = problem_files.problem_of(row.fields)
    if problem.key != row.key:
        raise Malformed(f"a problem is under the key {str(row.key)[:LONGEST_NAME]!r}, which is not its own")
    return problem


def run_of(row: RunRow) -> RunRecord:
    checked = decoded(row, _RunShape)
    decoded(checked.settings.get("conditions"), _DeployedShape | None)
    return RunRecord(
        problem=problem_of(row.problem),
        hardware=hardware_of(row.hardware),
        environment=environment_of(row.environment),
        **msgspec.structs.asdict(checked) | {"notices": tuple(checked.notices or ()), "accounts": checked.accounts or {}},
    )


def conditions_of(key: str) -> Conditions:
    """The inverse of `Conditions.key`."""
    try:
        mode, l2, skew_us = key.split("/")
        return Conditions(mode, l2, float(skew_us))
    except (ValueError, AttributeError):
        raise Malformed(f"conditions are {str(key)[:40]!r}") from None


def trial_of(row: TrialRow, run: RunRecord) -> TrialRecord:
    checked = decoded(row, _TrialShape)
    decoded(checked.conditions, _DeployedShape)
    if checked.status == "ok" and checked.latency_us is None:
        raise Malformed(f"trial {checked.id} is ok, but has no latency")
    return TrialRecord(**msgspec.structs.asdict(checked) | {"config": checked.config.config, "run": run})


def winner_of(row: WinnerRow, with_samples: bool, measured: object) -> WinnerRecord:
    """The winner of a row. `measured` are the conditions of its trial; None without one."""
    checked = decoded(row, _WinnerShape)
    values = msgspec.structs.asdict(checked) | {"config": checked.config.config, "baseline": checked.baseline.config}
    return WinnerRecord(
        problem=problem_of(row.problem),
        hardware=hardware_of(row.hardware),
        environment=environment_of(row.environment),
        samples=decoded(row.samples, dict[Name, SampleLists] | None) if with_samples else None,
        machine_code=decoded(measured or {}, _MeasuredShape).machine_code,
        **values | {"conditions": conditions_of(checked.conditions)},
    )


def miss_of(row: MissRow) -> MissRecord:
    checked = decoded(row, _MissShape)
    return MissRecord(
        problem=problem_of(row.problem),
        hardware=hardware_of(row.hardware),
        conditions=conditions_of(checked.conditions),
        count=checked.count,
        last_asked=checked.last_asked,
    )


# Types of the columns

_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]


class _RunShape(msgspec.Struct):
    id: int
    settings: dict[str, Any]
    status: Literal[RUN_STATUSES]  # type: ignore[valid-type]
    started_at: datetime
    ended_at: datetime | None
    notices: list[str] | None
    accounts: dict[str, float] | None


class _TrialShape(msgspec.Struct):
    id: int
    number: int
    config: ConfigShape
    kernel_digest: _Text
    status: Literal[TRIAL_STATUSES]  # type: ignore[valid-type]
    latency_us: Sample | None
    samples: SampleLists | None
    slowest_rank: int | None
    compile_s: Annotated[float, msgspec.Meta(ge=0.0, lt=LARGEST)] | None
    verified: bool
    relative_error: float | None
    """Infinity represents NaN."""
    error: str | None
    conditions: dict[str, Any]
    created_at: datetime


class _DeployedShape(msgspec.Struct):
    """The fields of a trial's conditions that are read; other fields are ignored."""

    mode: Literal[MODES] = "graph"  # type: ignore[valid-type]
    l2: str = "cold"
    skew_us: Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_SKEW_US)] = 0.0
    stage: str = ""


class _MeasuredShape(msgspec.Struct):
    """The field of a trial's conditions that belongs to its winner."""

    machine_code: CodeDigest | None = None


class _WinnerShape(msgspec.Struct):
    trial_id: int
    config: ConfigShape
    kernel_digest: _Text
    latency_us: Positive
    baseline_us: Positive
    baseline: ConfigShape
    speedup: Positive
    interval_low: Positive
    interval_high: Positive
    tie: bool
    verified: bool
    conditions: _Text
    created_at: datetime


class _MissShape(msgspec.Struct):
    conditions: _Text
    count: int
    last_asked: datetime


# Fast loading of all winners for look-ups at program start.

class _Row(msgspec.Struct, array_like=True):
    """The columns in the order of the query."""

    problem_key: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    hardware: str
    software: str
    conditions: str
    kernels: str
    config: str
    speedup: Positive
    interval_low: Positive
    interval_high: Positive
    tie: bool | Annotated[int, msgspec.Meta(ge=0, le=1)]
    trial_id: int
    latency_us: Positive


_NOWHERE = Place(Hardware("", "", "", 0, 0, 0, 0, 0, ""), Environment("", "", "", "", ""), Conditions())


def _with_column_names(message: str) -> str:
    """An error message in which the name of the column replaces its index."""
    return re.sub(r"\$\[(\d+)\]", lambda at: f"$.{_Row.__struct_fields__[int(at[1])]}", message)


def indexed_winners(session: Session) -> list[IndexedWinner]:
    """All winners of the database as the index reads them, malformed rows included."""
    hardware = {row.digest: row for row in session.scalars(select(HardwareRow))}
    software = {row.digest: row for row in session.scalars(select(EnvironmentRow))}

    @cache  # thousands of winners share a few places
    def place(of_hardware: str, of_software: str, conditions: str) -> Place:
        devices = hardware_of(hardware[of_hardware])
        return Place(devices, environment_of(software[of_software]), conditions_of(conditions))

    @cache  # and a few configs
    def check(config: str) -> None:
        from_json(config, ConfigShape)

    def indexed(values: Sequence[object]) -> IndexedWinner:
        try:
            row: _Row = converted(values, _Row)
            check(row.config)
            where = place(row.hardware, row.software, row.conditions)
            figures = row.speedup, row.interval_low, row.interval_high
            return IndexedWinner(
                row.problem_key, where, row.kernels, row.config, *figures, bool(row.tie), row.trial_id, row.latency_us
            )  # fmt: skip
        except (Malformed, KeyError) as error:
            defect = _with_column_names(str(error)) if isinstance(error, Malformed) else "its place is not there"
            # A malformed row stays in the index, so that a look-up can name it.
            return IndexedWinner(str(values[0])[:LONGEST_NAME], _NOWHERE, "", "{}", 1.0, 1.0, 1.0, False, 0, defect=defect)

    # JSON as text. SQLite keeps it as text, and its cast would fail the whole query for a blob that is not UTF-8.
    on_sqlite = session.get_bind().dialect.name == "sqlite"
    config = type_coerce(WinnerRow.config, Text) if on_sqlite else cast(WinnerRow.config, Text)
    query = select(
        WinnerRow.problem_key,
        WinnerRow.hardware_digest,
        WinnerRow.environment_digest,
        WinnerRow.conditions,
        WinnerRow.kernel_digest,
        config,
        WinnerRow.speedup,
        WinnerRow.interval_low,
        WinnerRow.interval_high,
        type_coerce(WinnerRow.tie, sqlalchemy.Integer),  # the raw value
        WinnerRow.trial_id,
        WinnerRow.latency_us,
    )
    rows = session.connection().execute(query)
    return [indexed(tuple(row)) for row in rows]


class _ShippedWinner(msgspec.Struct):
    """The fields of `Entry.to_dict` that a look-up reads."""

    problem: dict[str, Any]
    hardware: HardwareShape  # type: ignore[valid-type]
    environment: EnvironmentShape  # type: ignore[valid-type]
    kernel_digest: str
    conditions: ConditionsShape
    config: ConfigShape
    latency_us: Positive
    speedup: Positive
    interval: tuple[Positive, Positive]
    tie: bool
    verified: Literal[True]


class _ShippedFile(msgspec.Struct):
    format: Literal[FORMAT]  # type: ignore[valid-type]
    version: Literal[VERSION]  # type: ignore[valid-type]
    winners: list[_ShippedWinner]


@lru_cache(maxsize=256)
def _place(hardware: Any, environment: Any, conditions: Any) -> Place:
    devices, software = map(msgspec.structs.asdict, (hardware, environment))
    return Place(Hardware(**devices), Environment(**software), _conditions(conditions))


@lru_cache(maxsize=256)
def _conditions(conditions: Any) -> Conditions:
    """Dozens of places share few conditions, each of which is checked when it is made."""
    return Conditions(**msgspec.structs.asdict(conditions))


def shipped_winners(path: Path) -> list[IndexedWinner]:
    """The winners of a file of this package. Problems are not made from them: their fields are in the order of the keys.

    Raises UsageError, of one line, if any part is invalid.
    """
    return [
        IndexedWinner(
            f"{winner.problem.pop('op', '')}/{','.join(f'{name}={value}' for name, value in winner.problem.items())}",
            _place(winner.hardware, winner.environment, winner.conditions),
            CURRENT.get(winner.kernel_digest, winner.kernel_digest),
            json.dumps(msgspec.structs.asdict(winner.config)),
            winner.speedup,
            *winner.interval,
            winner.tie,
            trial_id=0,
            latency_us=winner.latency_us,
        )
        for winner in _document(path, _ShippedFile).winners
    ]
