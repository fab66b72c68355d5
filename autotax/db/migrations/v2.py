"""Version 2: conditions are part of a winner's key; runs keep notices and accounts.

Like every migration it spells out the tables as they were, and takes nothing from the rest of the package, which goes on
changing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import JSON, Column, Connection, Integer, String, bindparam, column, select, table, update

if TYPE_CHECKING:
    from alembic.operations import Operations

_HARDWARE = table("autotax_hardware", column("digest", String), column("backend", String))
_RUN = table("autotax_run", column("id", Integer), column("hardware_digest", String))
_TRIAL = table("autotax_trial", column("id", Integer), column("run_id", Integer), column("conditions", JSON))
_WINNER = table("autotax_winner", column("trial_id", Integer), column("conditions", String))

_L2 = {"rotated inputs": "cold", "as found": "warm"}
_KEY = ["problem_key", "hardware_digest", "kernel_digest", "world_size", "comm", "conditions"]


def upgrade(op: Operations) -> None:
    op.add_column("autotax_run", Column("notices", JSON))
    op.add_column("autotax_run", Column("accounts", JSON))
    op.add_column("autotax_winner", Column("conditions", String(64)))
    _spell_out_conditions(op.get_bind())
    with op.batch_alter_table("autotax_winner") as batch:  # SQLite cannot alter a key: there the table is copied
        batch.alter_column("conditions", existing_type=String(64), nullable=False)
        batch.drop_constraint("pk_autotax_winner", type_="primary")
        batch.create_primary_key("pk_autotax_winner", _KEY)


def _spell_out_conditions(connection: Connection) -> None:
    """In trials as they are written today, and in winners as in the trial that earned each."""
    found = connection.execute(
        select(_TRIAL.c.id, _TRIAL.c.conditions, _HARDWARE.c.backend)
        .join_from(_TRIAL, _RUN, _TRIAL.c.run_id == _RUN.c.id)
        .join(_HARDWARE, _RUN.c.hardware_digest == _HARDWARE.c.digest)
    )
    trials = [{"trial": row.id, "said": _today(row.conditions, row.backend)} for row in found]
    winners = [{"trial": each["trial"], "said": _key(each["said"])} for each in trials]
    if trials:
        of_trial, of_winner = _TRIAL.c.id == bindparam("trial"), _WINNER.c.trial_id == bindparam("trial")
        connection.execute(update(_TRIAL).where(of_trial).values(conditions=bindparam("said")), trials)
        connection.execute(update(_WINNER).where(of_winner).values(conditions=bindparam("said")), winners)


def _today(conditions: Mapping[str, Any], backend: str) -> dict[str, Any]:
    usual: dict[str, Any] = {"mode": "eager", "l2": "warm"} if backend == "cpu" else {"mode": "graph", "l2": "cold"}
    spelt = usual | {"skew_us": 0.0} | dict(conditions)
    return spelt | {"l2": _L2.get(spelt["l2"], spelt["l2"])}


def _key(conditions: Mapping[str, Any]) -> str:
    return f"{conditions['mode']}/{conditions['l2']}/{conditions['skew_us']:g}"
