"""READING one winner of a file, with mistrust: every field is there, of its type, and of a size that a database takes."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from sqlalchemy import BigInteger, String

from autotax.core.conditions import Conditions
from autotax.core.validation import (
    PLAIN,
    ConfigShape,
    Integer,
    Malformed,
    Name,
    Positive,
    SampleLists,
    Small,
    from_json,
    problem_of,
)
from autotax.db.former_digests import current_digest
from autotax.db.ranking import Entry
from autotax.db.records import WinnerRecord
from autotax.db.schema import Base, Digest, EnvironmentRow, HardwareRow
from autotax.hardware import BACKENDS, Environment, Hardware


def _shape(record: type[Hardware | Environment], row: type[Base], **special: Any) -> type[msgspec.Struct]:
    """The fields of a record, each as its column takes it."""

    def kind(name: str) -> Any:
        column = row.__table__.columns[name].type
        if isinstance(column, String):
            return Annotated[str, msgspec.Meta(max_length=column.length or 1000, pattern=PLAIN)]
        return Integer if isinstance(column, BigInteger) else Small

    told = [(field.name, special.get(field.name) or kind(field.name)) for field in fields(record)]
    return msgspec.defstruct(record.__name__, told, forbid_unknown_fields=True)


HardwareShape = _shape(Hardware, HardwareRow, backend=Literal[BACKENDS])
EnvironmentShape = _shape(Environment, EnvironmentRow)
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class ConditionsShape(msgspec.Struct, forbid_unknown_fields=True):
    mode: str
    l2: str
    skew_us: float


class EntryShape(msgspec.Struct, forbid_unknown_fields=True):
    """What `Entry.to_dict` gives."""

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
    """The inverse of `Entry.to_dict`, of JSON. Raises Malformed or UsageError."""
    found = from_json(text, EntryShape)
    if not found.verified:
        raise Malformed("it is not verified")
    if found.interval[0] > found.interval[1]:
        raise Malformed("interval is not two numbers, the lower one first")
    conditions = Conditions(**msgspec.structs.asdict(found.conditions))
    if conditions.skew_us != found.conditions.skew_us:
        raise Malformed("conditions.skew_us has more digits than are kept")
    winner = WinnerRecord(
        problem=problem_of(found.problem),
        hardware=hardware_of(found.hardware),
        environment=environment_of(found.environment),
        conditions=conditions,
        trial_id=0,
        config=found.config.config,
        kernel_digest=current_digest(found.kernel_digest),
        baseline=found.baseline.config,
        latency_us=found.latency_us,
        baseline_us=found.baseline_us,
        speedup=found.speedup,
        interval_low=found.interval[0],
        interval_high=found.interval[1],
        tie=found.tie,
        verified=True,
        samples=found.samples,
        created_at=found.tuned_at,
    )
    return Entry(winner, found.tuned_by)
