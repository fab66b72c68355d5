"""Validates one winner of a file: every field exists, has its type, and has a size that a database accepts."""

from __future__ import annotations

import getpass
import json
import platform
from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from sqlalchemy import BigInteger, String

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.core.files import (
    PLAIN,
    ConfigShape,
    Integer,
    Malformed,
    Name,
    Positive,
    SampleLists,
    Small,
    from_json,
    read_bytes,
    write_whole,
)
from autotax.db.records import Entry, WinnerRecord
from autotax.db.schema import Base, Digest, EnvironmentRow, HardwareRow, current_digest
from autotax.hardware import BACKENDS, Hardware
from autotax.operators.problem_files import problem_of
from autotax.software import Environment


def _shape(record: type[Hardware | Environment], row: type[Base], **special: Any) -> type[msgspec.Struct]:
    """The fields of a record, each with the type and the bounds of its column."""

    def kind(name: str) -> Any:
        column = row.__table__.columns[name].type
        if isinstance(column, String):
            return Annotated[str, msgspec.Meta(max_length=column.length or 1000, pattern=PLAIN)]
        return Integer if isinstance(column, BigInteger) else Small

    field_types = [(field.name, special.get(field.name) or kind(field.name)) for field in fields(record)]
    return msgspec.defstruct(record.__name__, field_types, forbid_unknown_fields=True)


HardwareShape = _shape(Hardware, HardwareRow, backend=Literal[BACKENDS])
EnvironmentShape = _shape(Environment, EnvironmentRow)
YEARS = 2000, 2999
"""The years of a winner. At both ends of the calendar no other time zone can tell the moment."""
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class ConditionsShape(msgspec.Struct, forbid_unknown_fields=True):
    mode: str
    l2: str
    skew_us: float


class EntryShape(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `Entry.to_dict`."""

    problem: dict[str, Any]
    hardware: HardwareShape  # type: ignore[valid-type]
    environment: EnvironmentShape  # type: ignore[valid-type]
    kernel_digest: Annotated[str, msgspec.Meta(max_length=Digest.length, pattern=PLAIN)]
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


def hardware_of(shape: Any) -> Hardware:
    return Hardware(**msgspec.structs.asdict(shape))


def environment_of(shape: Any) -> Environment:
    return Environment(**msgspec.structs.asdict(shape))


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
        problem=problem_of(shape.problem),
        hardware=hardware_of(shape.hardware),
        environment=environment_of(shape.environment),
        conditions=conditions,
        trial_id=0,
        config=shape.config.config,
        kernel_digest=current_digest(shape.kernel_digest),
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
    """The entries of a file, which gzip or xz may have compressed.

    Raises UsageError, of one line, if any part of the file is invalid.
    """
    try:
        document = from_json(read_bytes(path), dict[str, msgspec.Raw])
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})")
    except Malformed as error:
        _refuse(path, f"is no export of autotax ({error})")
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


def _field(document: dict[str, msgspec.Raw], name: str) -> Any:
    try:
        return from_json(document.get(name, b"null"), str | int | None)  # type: ignore[arg-type]
    except Malformed:
        return None


def _entry(path: Path, number: int, text: msgspec.Raw) -> Entry:
    try:
        return entry_from_json(text)
    except (Malformed, UsageError) as error:
        _refuse(path, f"is malformed at winner {number}: {error}")


def _refuse(path: Path, what: str, remedy: str = "") -> NoReturn:
    raise UsageError(f"file {path} {' '.join(what.split())}; nothing was taken from it: {remedy}give a file of `autotax export`")
