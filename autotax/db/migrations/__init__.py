"""OLDER databases, brought to today's schema one version at a time.

Which schema a database has stands in `autotax_meta.schema_version` and nowhere else: every autotax ever released reads it
before anything else, and so refuses what is newer than it knows. Alembic lends its operations; of its version table there
is none, for Optuna has one in the same database.
"""

from __future__ import annotations

from sqlalchemy import Connection, update

from autotax.db.migrations import v2, v3, v4
from autotax.db.schema import SCHEMA_VERSION, Meta

_STEPS = {2: v2.upgrade, 3: v3.upgrade, 4: v4.upgrade}
"""By the version that each leads to."""


def upgrade(connection: Connection, version: int) -> None:
    """Brings a database of an older `version` to today's schema, in the transaction of `connection`."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    operations = Operations(MigrationContext.configure(connection))
    for step in range(version + 1, SCHEMA_VERSION + 1):
        _STEPS[step](operations)
    connection.execute(update(Meta).where(Meta.name == "schema_version").values(value=str(SCHEMA_VERSION)))
