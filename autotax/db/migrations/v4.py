"""Version 4: trials and winners carry the digest of their variant's sources, not that of all kernel sources.

The digests of what was published are taken from `autotax.db.released`, which never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Column, Connection, Integer, String, column, select, table, update

from autotax.db import released

if TYPE_CHECKING:
    from alembic.operations import Operations

_PROBLEM = table("autotax_problem", column("key", String), column("op", String))
_ENVIRONMENT = table("autotax_environment", column("digest", String), column("kernels", String))
_RUN = table(
    "autotax_run", column("id", Integer), column("problem_key", String), column("environment_digest", String)
)
_TRIAL = table(
    "autotax_trial", column("id", Integer), column("run_id", Integer), column("variant", String), column("kernel_digest", String)
)
_WINNER = table("autotax_winner", column("trial_id", Integer), column("kernel_digest", String))


def upgrade(op: Operations) -> None:
    op.add_column("autotax_trial", Column("kernel_digest", String(16), nullable=False, server_default=""))
    connection = op.get_bind()
    _copy_from_environments(connection)
    _name_what_was_released(connection)
    # No two winners come to share a key: a digest of all sources becomes one of a variant that no other digest becomes.
    of_trial = select(_TRIAL.c.kernel_digest).where(_TRIAL.c.id == _WINNER.c.trial_id)
    connection.execute(update(_WINNER).values(kernel_digest=of_trial.scalar_subquery()))


def _copy_from_environments(connection: Connection) -> None:
    of_run = (
        select(_ENVIRONMENT.c.kernels)
        .join_from(_RUN, _ENVIRONMENT, _RUN.c.environment_digest == _ENVIRONMENT.c.digest)
        .where(_RUN.c.id == _TRIAL.c.run_id)
    )
    connection.execute(update(_TRIAL).values(kernel_digest=of_run.scalar_subquery()))


def _name_what_was_released(connection: Connection) -> None:
    for (operator, variant), digest in released.VARIANTS.items():
        runs = (
            select(_RUN.c.id)
            .join_from(_RUN, _PROBLEM, _RUN.c.problem_key == _PROBLEM.c.key)
            .where(_PROBLEM.c.op == operator)
        )
        those = (_TRIAL.c.kernel_digest == released.ALL_SOURCES, _TRIAL.c.variant == variant, _TRIAL.c.run_id.in_(runs))
        connection.execute(update(_TRIAL).where(*those).values(kernel_digest=digest))
