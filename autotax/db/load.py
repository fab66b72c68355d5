"""LOADING all winners for look-ups, as quickly as a program can start.

It makes no objects of rows and keeps JSON as text. It reads no column that a row holds behind its samples, for SQLite would read
all of them on the way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import msgspec
from sqlalchemy import Integer, Text, cast, select, type_coerce
from sqlalchemy.orm import Session

from autotax.core.conditions import Conditions
from autotax.core.validation import LONGEST_NAME, ConfigShape, Malformed, Positive, converted, from_json
from autotax.db import row_mapping
from autotax.db.index import Known
from autotax.db.schema import EnvironmentRow, HardwareRow, WinnerRow
from autotax.db.staleness import Place
from autotax.hardware import Environment, Hardware


class _Row(msgspec.Struct, array_like=True):
    """In the order of the query."""

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


class Broken(Known):
    """Stands for a winner whose row is malformed, so that a look-up can say so. It holds nowhere; `config_json` is the reason."""

    def differences(self, here: Place) -> list[str]:  # noqa: ARG002
        return [f"its row in the database is malformed ({self.config_json})"]


_NOWHERE = Place(Hardware("", "", "", 0, 0, 0, 0, 0, ""), Environment("", "", "", "", ""), Conditions())


def _by_name(told: str) -> str:
    """What is wrong with a row, with the name of the column for its number."""
    return re.sub(r"\$\[(\d+)\]", lambda at: f"$.{_Row.__struct_fields__[int(at[1])]}", told)


def known_winners(session: Session) -> list[Known]:
    hardware = {row.digest: row for row in session.scalars(select(HardwareRow))}
    software = {row.digest: row for row in session.scalars(select(EnvironmentRow))}

    @cache  # thousands of winners are of few places
    def place(of_hardware: str, of_software: str, conditions: str) -> Place:
        devices = row_mapping.hardware_of(hardware[of_hardware])
        return Place(devices, row_mapping.environment_of(software[of_software]), row_mapping.conditions_of(conditions))

    @cache  # and of few configs
    def check(config: str) -> None:
        from_json(config, ConfigShape)

    def known(values: Sequence[object]) -> Known:
        try:
            row: _Row = converted(values, _Row)
            check(row.config)
            where = place(row.hardware, row.software, row.conditions)
            figures = row.speedup, row.interval_low, row.interval_high
            return Known(row.problem_key, where, row.kernels, row.config, *figures, bool(row.tie), row.trial_id)
        except (Malformed, KeyError) as error:
            told = _by_name(str(error)) if isinstance(error, Malformed) else "its place is not there"
            return Broken(str(values[0])[:LONGEST_NAME], _NOWHERE, "", told, 1.0, 1.0, 1.0, False, 0)

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
        type_coerce(WinnerRow.tie, Integer),  # as it stands there
        WinnerRow.trial_id,
    )
    found = session.connection().execute(query)
    return [known(tuple(row)) for row in found]
