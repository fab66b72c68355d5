"""READING rows of a fleet: anybody may have edited them, so each JSON column is read as a declared type, or is Malformed."""

from __future__ import annotations

from typing import Any

import msgspec

from autotax.core.errors import UsageError
from autotax.core.settings import Settings
from autotax.core.validation import Malformed, Name, Positive, converted, problem_of, reason
from autotax.db import file_format
from autotax.fleet.messages import FleetJob, HostHello
from autotax.hardware import Environment


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
