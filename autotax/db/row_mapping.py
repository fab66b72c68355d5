"""Converts between rows and records, so that no row leaves the store."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from sqlalchemy import Integer, Text, cast, select, type_coerce
from sqlalchemy.orm import Session

from autotax.core.conditions import LONGEST_SKEW_US, MODES, Conditions
from autotax.core.files import (
    LARGEST,
    LONGEST_NAME,
    ConfigShape,
    Malformed,
    Name,
    Positive,
    Sample,
    SampleLists,
    converted,
    from_json,
)
from autotax.core.problem import Problem
from autotax.core.settings import RUN_STATUSES, TRIAL_STATUSES
from autotax.db import file_format
from autotax.db.index import IndexedWinner
from autotax.db.records import MissRecord, Place, RunRecord, TrialRecord, WinnerRecord
from autotax.db.schema import EnvironmentRow, HardwareRow, MissRow, ProblemRow, RunRow, TrialRow, WinnerRow
from autotax.hardware import Hardware
from autotax.operators import problem_files
from autotax.software import Environment


def problem_row(problem: Problem) -> ProblemRow:
    return ProblemRow(key=problem.key, op=problem.op, fields=problem.to_dict())


def hardware_row(hardware: Hardware) -> HardwareRow:
    return HardwareRow(digest=hardware.digest, **hardware.to_dict())


def environment_row(environment: Environment) -> EnvironmentRow:
    return EnvironmentRow(digest=environment.digest, **environment.to_dict())


def trial_row(run_id: int, trial: TrialRecord, kernel_digest: str) -> TrialRow:
    # An output that was never written has an error of NaN. SQLite would store NaN as NULL, which means "not compared".
    unreadable = trial.relative_error is not None and math.isnan(trial.relative_error)
    return TrialRow(
        run_id=run_id,
        number=trial.number,
        variant=trial.config.variant,
        config=trial.config.to_dict(),
        config_digest=trial.config.digest,
        kernel_digest=kernel_digest,
        status=trial.status,
        latency_us=trial.latency_us,
        samples=trial.samples,
        slowest_rank=trial.slowest_rank,
        compile_s=trial.compile_s,
        verified=trial.verified,
        relative_error=math.inf if unreadable else trial.relative_error,
        error=trial.error and storable(trial.error),
        conditions=trial.conditions,
    )


def storable(text: str) -> str:
    """Makes a text storable: a compiler or a dying rank may print any bytes, but databases refuse NUL and invalid UTF-8."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def winner_row(winner: WinnerRecord) -> WinnerRow:
    return WinnerRow(
        problem_key=winner.problem.key,
        hardware_digest=winner.hardware.digest,
        kernel_digest=winner.kernel_digest,
        world_size=winner.problem.to_dict()["world_size"],
        comm=winner.comm,
        conditions=winner.conditions.key,
        triton=winner.environment.triton,
        environment_digest=winner.environment.digest,
        trial_id=winner.trial_id,
        config=winner.config.to_dict(),
        latency_us=winner.latency_us,
        baseline_us=winner.baseline_us,
        baseline=winner.baseline.to_dict(),
        speedup=winner.speedup,
        interval_low=winner.interval_low,
        interval_high=winner.interval_high,
        tie=winner.tie,
        verified=winner.verified,
        samples=winner.samples,
        created_at=winner.created_at or datetime.now(UTC),
    )


def miss_row(miss: MissRecord) -> MissRow:
    return MissRow(
        problem_key=miss.problem.key,
        hardware_digest=miss.hardware.digest,
        conditions=miss.conditions.key,
        count=miss.count,
        last_asked=miss.last_asked,
    )


def hardware_of(row: HardwareRow) -> Hardware:
    return file_format.hardware_of(decoded(row, file_format.HardwareShape))


def environment_of(row: EnvironmentRow) -> Environment:
    return file_format.environment_of(decoded(row, file_format.EnvironmentShape))


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


def winner_of(row: WinnerRow, with_samples: bool) -> WinnerRecord:
    checked = decoded(row, _WinnerShape)
    values = msgspec.structs.asdict(checked) | {"config": checked.config.config, "baseline": checked.baseline.config}
    return WinnerRecord(
        problem=problem_of(row.problem),
        hardware=hardware_of(row.hardware),
        environment=environment_of(row.environment),
        samples=decoded(row.samples, dict[Name, SampleLists] | None) if with_samples else None,
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


def decoded(row: object, shape: Any) -> Any:
    """Decodes a row, or one of its JSON columns, as a value of this type. Raises Malformed, because a database may have been
    edited.
    """
    return converted(row, shape, attributes=True)


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


_NOWHERE = Place(Hardware("", "", "", 0, 0, 0, 0, 0, ""), Environment("", "", "", "", ""), Conditions())


def _by_name(name: str) -> str:
    """An error message in which the name of the column replaces its index."""
    return re.sub(r"\$\[(\d+)\]", lambda at: f"$.{_Row.__struct_fields__[int(at[1])]}", name)


def known_winners(session: Session) -> list[IndexedWinner]:
    hardware = {row.digest: row for row in session.scalars(select(HardwareRow))}
    software = {row.digest: row for row in session.scalars(select(EnvironmentRow))}

    @cache  # thousands of winners share a few places
    def place(of_hardware: str, of_software: str, conditions: str) -> Place:
        devices = hardware_of(hardware[of_hardware])
        return Place(devices, environment_of(software[of_software]), conditions_of(conditions))

    @cache  # and a few configs
    def check(config: str) -> None:
        from_json(config, ConfigShape)

    def known(values: Sequence[object]) -> IndexedWinner:
        try:
            row: _Row = converted(values, _Row)
            check(row.config)
            where = place(row.hardware, row.software, row.conditions)
            figures = row.speedup, row.interval_low, row.interval_high
            return IndexedWinner(row.problem_key, where, row.kernels, row.config, *figures, bool(row.tie), row.trial_id)
        except (Malformed, KeyError) as error:
            defect = _by_name(str(error)) if isinstance(error, Malformed) else "its place is not there"
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
        type_coerce(WinnerRow.tie, Integer),  # the raw value
        WinnerRow.trial_id,
    )
    checked = session.connection().execute(query)
    return [known(tuple(row)) for row in checked]
