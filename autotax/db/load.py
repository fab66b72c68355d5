"""LOADING all winners for look-ups, as quickly as a program can start: no objects of rows, no JSON but as text,
and no column that a row holds behind its samples, for SQLite would read all of them on the way.
"""

from __future__ import annotations

from functools import cache

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from autotax.db import convert
from autotax.db.differences import Place
from autotax.db.index import Known
from autotax.db.schema import EnvironmentRow, HardwareRow, WinnerRow


def known_winners(session: Session) -> list[Known]:
    hardware = {row.digest: convert.hardware_of(row) for row in session.scalars(select(HardwareRow))}
    software = {row.digest: convert.environment_of(row) for row in session.scalars(select(EnvironmentRow))}

    @cache  # thousands of winners are of few places
    def place(of_hardware: str, of_software: str, conditions: str) -> Place:
        return Place(hardware[of_hardware], software[of_software], convert.conditions_of(conditions))

    query = select(
        WinnerRow.problem_key,
        WinnerRow.hardware_digest,
        WinnerRow.environment_digest,
        WinnerRow.conditions,
        WinnerRow.kernel_digest,
        cast(WinnerRow.config, Text),
        WinnerRow.speedup,
        WinnerRow.interval_low,
        WinnerRow.interval_high,
        WinnerRow.tie,
        WinnerRow.trial_id,
    )
    found = session.connection().execute(query)
    return [
        Known(key, place(devices, versions, conditions), kernels, config, speedup, low, high, tie, trial_id)
        for key, devices, versions, conditions, kernels, config, speedup, low, high, tie, trial_id in found
    ]
