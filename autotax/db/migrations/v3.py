"""Version 3: the version of triton is part of a winner's key; what programs asked for in vain is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    ForeignKeyConstraint,
    PrimaryKeyConstraint,
    String,
    column,
    select,
    table,
    update,
)

if TYPE_CHECKING:
    from alembic.operations import Operations

_ENVIRONMENT = table("autotax_environment", column("digest", String), column("triton", String))
_WINNER = table("autotax_winner", column("environment_digest", String), column("triton", String))

_KEY = ["problem_key", "hardware_digest", "kernel_digest", "world_size", "comm", "conditions", "triton"]


def upgrade(op: Operations) -> None:
    op.add_column("autotax_winner", Column("triton", String(64)))
    _name_triton(op.get_bind())
    with op.batch_alter_table("autotax_winner") as batch:  # SQLite cannot alter a key: there the table is copied
        batch.alter_column("triton", existing_type=String(64), nullable=False)
        batch.drop_constraint("pk_autotax_winner", type_="primary")
        batch.create_primary_key("pk_autotax_winner", _KEY)
    op.create_table(
        "autotax_miss",
        Column("problem_key", String(200), nullable=False),
        Column("hardware_digest", String(16), nullable=False),
        Column("conditions", String(64), nullable=False),
        Column("count", BigInteger, nullable=False),
        Column("last_asked", DateTime, nullable=False),
        PrimaryKeyConstraint("problem_key", "hardware_digest", "conditions", name="pk_autotax_miss"),
        ForeignKeyConstraint(["problem_key"], ["autotax_problem.key"], name="fk_autotax_miss_problem_key"),
        ForeignKeyConstraint(["hardware_digest"], ["autotax_hardware.digest"], name="fk_autotax_miss_hardware_digest"),
    )


def _name_triton(connection: Connection) -> None:
    measured_with = select(_ENVIRONMENT.c.triton).where(_ENVIRONMENT.c.digest == _WINNER.c.environment_digest)
    connection.execute(update(_WINNER).values(triton=measured_with.scalar_subquery()))
