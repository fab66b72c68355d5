"""READING one winner of a file, with mistrust: every field is there, of its type, and of a size that a database takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, String

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db import released
from autotax.db.convert import storable
from autotax.db.evidence import Entry
from autotax.db.records import Samples, WinnerRecord
from autotax.db.schema import Base, EnvironmentRow, HardwareRow
from autotax.hardware import BACKENDS, Environment, Hardware
from autotax.problem import Problem, problem_from_dict

LARGEST = 1e15
"""Microseconds, some thirty years."""
DIGEST = 16
"""Characters of a digest of sources."""
LONGEST_NAME = 200
"""Characters of a parameter, a digest, a user: what nobody would exceed in earnest."""


class Malformed(Exception):
    """What is wrong with an entry, in a few words."""


def entry_from_dict(values: object, version: int) -> Entry:
    """The inverse of `Entry.to_dict`, in a file of this version. Raises Malformed or UsageError."""
    names = "problem hardware environment conditions config baseline latency_us baseline_us speedup interval tie verified samples"
    told = {"tuned_at", "tuned_by"} | ({"kernel_digest"} if version > 1 else set())
    found = _object("it", values, set(names.split()) | told)
    hardware = Hardware(**_columns("hardware", found["hardware"], Hardware, HardwareRow))
    if hardware.backend not in BACKENDS:
        raise Malformed(f"hardware.backend is {hardware.backend!r}")
    if found["verified"] is not True or not isinstance(found["tie"], bool):
        raise Malformed("it is not verified" if found["verified"] is not True else "tie is not true or false")
    low, high = _interval(found["interval"])
    problem, config = _problem(found["problem"]), _config("config", found["config"])
    environment = Environment(**_columns("environment", found["environment"], Environment, EnvironmentRow))
    if version > 1:
        digest = _text("kernel_digest", found["kernel_digest"], DIGEST)
    else:
        digest = released.variant_digest(environment.kernels, problem.op, config.variant)
    winner = WinnerRecord(
        problem=problem,
        hardware=hardware,
        environment=environment,
        conditions=_conditions(found["conditions"]),
        trial_id=0,
        config=config,
        kernel_digest=digest,
        baseline=_config("baseline", found["baseline"]),
        latency_us=_positive("latency_us", found["latency_us"]),
        baseline_us=_positive("baseline_us", found["baseline_us"]),
        speedup=_positive("speedup", found["speedup"]),
        interval_low=low,
        interval_high=high,
        tie=found["tie"],
        verified=True,
        samples=_samples(found["samples"]),
        created_at=_moment(found["tuned_at"]),
    )
    return Entry(winner, None if found["tuned_by"] is None else _text("tuned_by", found["tuned_by"]))


def _object(name: str, values: object, wanted: set[str]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise Malformed(f"{name} is not an object")
    if lacking := sorted(wanted - set(values)):
        raise Malformed(f"{name} lacks {', '.join(lacking)}")
    if unknown := sorted(set(values) - wanted):
        raise Malformed(f"{name} has the unknown {', '.join(unknown)[:LONGEST_NAME]}")
    return values


def _columns(name: str, values: object, record: type[Hardware | Environment], row: type[Base]) -> dict[str, Any]:
    """The fields of a record, each as its column takes it."""
    found = _object(name, values, {field.name for field in fields(record)})
    for each, column in ((each, row.__table__.columns[each]) for each in found):
        label = f"{name}.{each}"
        if isinstance(column.type, String):
            _text(label, found[each], column.type.length or 1000)
        else:
            _whole(label, found[each], 63 if isinstance(column.type, BigInteger) else 31)
    return found


def _problem(values: object) -> Problem:
    if not isinstance(values, dict):
        raise Malformed("problem is not an object")
    return problem_from_dict(values)


def _conditions(values: object) -> Conditions:
    found = _object("conditions", values, {field.name for field in fields(Conditions)})
    skew = found["skew_us"]
    if isinstance(skew, bool) or not isinstance(skew, int | float):
        raise Malformed("conditions.skew_us is not a number")
    conditions = Conditions(found["mode"], found["l2"], float(skew))
    if conditions.skew_us != skew:
        raise Malformed("conditions.skew_us has more digits than are kept")
    return conditions


def _config(name: str, values: object) -> Config:
    found = _object(name, values, {"variant", "params"})
    params = found["params"]
    if not isinstance(params, dict):
        raise Malformed(f"{name}.params is not an object")
    for each, value in params.items():
        _text(f"a name in {name}.params", each)
        if isinstance(value, str):
            _text(f"{name}.params.{each}", value)
        else:
            _whole(f"{name}.params.{each}", value, 63)
    return Config.of(_text(f"{name}.variant", found["variant"], 64), params)


def _samples(values: object) -> dict[str, Samples] | None:
    if values is None:
        return None
    if not isinstance(values, dict):
        raise Malformed("samples are not an object")
    for digest, ranks in values.items():
        _text("a digest in samples", digest)
        for rank in _list("samples of a config", ranks):
            for sample in _list("samples of a rank", rank):
                _positive("a sample", sample)
    return values


def _interval(values: object) -> tuple[float, float]:
    ends = [_positive("an end of interval", end) for end in _list("interval", values)]
    if len(ends) != 2 or ends[0] > ends[1]:
        raise Malformed("interval is not two numbers, the lower one first")
    return ends[0], ends[1]


def _list(name: str, values: object) -> Sequence[Any]:
    if not isinstance(values, list):
        raise Malformed(f"{name} is not a list")
    return values


def _text(name: str, value: object, most: int = LONGEST_NAME) -> str:
    if not isinstance(value, str) or len(value) > most or storable(value) != value:
        raise Malformed(f"{name} is not a text of up to {most} characters")
    return value


def _whole(name: str, value: object, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**bits) <= value < 2**bits:
        raise Malformed(f"{name} is not a whole number of {bits + 1} bits")
    return value


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < LARGEST:
        raise Malformed(f"{name} is not a number above zero")
    return float(value)


def _moment(value: object) -> datetime:
    try:
        moment = datetime.fromisoformat(_text("tuned_at", value))
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise Malformed("tuned_at is not a moment with its time zone")
    return moment
