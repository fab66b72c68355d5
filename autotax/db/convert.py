"""Between rows and records, so that no row ever leaves the store."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import UTC, datetime

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db.records import MissRecord, RunRecord, TrialRecord, WinnerRecord
from autotax.db.schema import EnvironmentRow, HardwareRow, MissRow, ProblemRow, RunRow, TrialRow, WinnerRow
from autotax.hardware import Environment, Hardware
from autotax.problem import Problem, problem_from_dict


def problem_row(problem: Problem) -> ProblemRow:
    return ProblemRow(key=problem.key, op=problem.op, fields=problem.to_dict())


def hardware_row(hardware: Hardware) -> HardwareRow:
    return HardwareRow(digest=hardware.digest, **hardware.to_dict())


def environment_row(environment: Environment) -> EnvironmentRow:
    return EnvironmentRow(digest=environment.digest, **environment.to_dict())


def trial_row(run_id: int, trial: TrialRecord, kernel_digest: str) -> TrialRow:
    # An output that was never written has an error of NaN, which SQLite would keep as NULL: "not compared".
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
    """A compiler or a dying rank may print anything; databases refuse NUL and what is not UTF-8."""
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
    return Hardware(**{field.name: getattr(row, field.name) for field in fields(Hardware)})


def environment_of(row: EnvironmentRow) -> Environment:
    return Environment(**{field.name: getattr(row, field.name) for field in fields(Environment)})


def run_of(row: RunRow) -> RunRecord:
    return RunRecord(
        id=row.id,
        problem=problem_from_dict(row.problem.fields),
        hardware=hardware_of(row.hardware),
        environment=environment_of(row.environment),
        settings=row.settings,
        status=row.status,
        started_at=row.started_at,
        ended_at=row.ended_at,
        notices=tuple(row.notices or ()),
        accounts=row.accounts or {},
    )


def conditions_of(key: str) -> Conditions:
    """The inverse of `Conditions.key`."""
    mode, l2, skew_us = key.split("/")
    return Conditions(mode, l2, float(skew_us))


def trial_of(row: TrialRow, run: RunRecord) -> TrialRecord:
    return TrialRecord(
        number=row.number,
        config=Config.from_dict(row.config),
        status=row.status,
        latency_us=row.latency_us,
        samples=row.samples,
        slowest_rank=row.slowest_rank,
        compile_s=row.compile_s,
        verified=row.verified,
        relative_error=row.relative_error,
        error=row.error,
        conditions=row.conditions,
        kernel_digest=row.kernel_digest,
        id=row.id,
        created_at=row.created_at,
        run=run,
    )


def winner_of(row: WinnerRow, with_samples: bool) -> WinnerRecord:
    return WinnerRecord(
        problem=problem_from_dict(row.problem.fields),
        hardware=hardware_of(row.hardware),
        environment=environment_of(row.environment),
        trial_id=row.trial_id,
        config=Config.from_dict(row.config),
        latency_us=row.latency_us,
        baseline_us=row.baseline_us,
        baseline=Config.from_dict(row.baseline),
        speedup=row.speedup,
        interval_low=row.interval_low,
        interval_high=row.interval_high,
        tie=row.tie,
        verified=row.verified,
        samples=row.samples if with_samples else None,
        conditions=conditions_of(row.conditions),
        kernel_digest=row.kernel_digest,
        created_at=row.created_at,
    )


def miss_of(row: MissRow) -> MissRecord:
    return MissRecord(
        problem=problem_from_dict(row.problem.fields),
        hardware=hardware_of(row.hardware),
        conditions=conditions_of(row.conditions),
        count=row.count,
        last_asked=row.last_asked,
    )
