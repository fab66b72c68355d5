"""OPENING a database: checked before it is touched, with our tables of today's schema in it, one writer at a time.

Whatever is wrong with what the user named comes out as a UsageError of one line, and leaves everything as it was.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection, Engine, QueuePool, StaticPool, case, create_engine, event, insert, select, update

from autotax.db import sqlite
from autotax.db.errors import Unusable, opening
from autotax.db.former_digests import CURRENT
from autotax.db.schema import PREFIX, SCHEMA_VERSION, Base, Meta, TrialRow, WinnerRow
from autotax.db.url import sqlite_path

_OPTUNA_TABLES = {"studies", "version_info"}  # the first ones that Optuna creates

_DIGESTS = {"name": "digests", "value": "by content"}
"""Says in `Meta` that no former digest is left in the tables."""

_LOCK = 0x6175746F746178  # "autotax" in ASCII
_ONE_WRITER = {"sqlite": "BEGIN IMMEDIATE", "postgresql": f"SELECT pg_advisory_xact_lock({_LOCK})"}


def open_engine(url: str, *, create: bool) -> Engine | None:
    """An engine on the autotax tables at a resolved `url`.

    With `create` the database and its tables are made if they are not there, and it must be writable. Without, nothing is
    written, and the answer is None where there are no autotax tables. Tables of another schema version are refused.
    """
    with opening(url):
        path = sqlite_path(url)
        if not (_file_has_tables(path) if path else _server_has_tables(url)) and not create:
            return None
        if path and create:
            sqlite.create(path)
        engine = _sqlite_engine(path, writes=create) if path else _with_one_writer(create_engine(url))
        try:
            if create:
                _make_ready(engine, path)
            else:
                with engine.begin() as connection:
                    _check_version(connection)
        except BaseException:
            engine.dispose()
            raise
        return engine


def empty_engine() -> Engine:
    """The tables with nothing in them, in memory."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    Base.metadata.create_all(engine)
    return engine


def writing(engine: Engine, *, alone: bool = True) -> Engine:
    """The engine for transactions that write: each waits for its turn when it begins.

    A transaction that reads first and asks for the lock later is thrown out if somebody wrote in between. What touches rows of
    one run only, which has one writer, need not be `alone` on a server, where a transaction lasts several round trips. Of a
    file there is always one writer.
    """
    return engine.execution_options(autotax_writes=True, autotax_alone=alone)


def _file_has_tables(path: Path) -> bool:
    names = sqlite.table_names(path)
    ours = any(name.startswith(PREFIX) for name in names)
    if names and not ours and not names & _OPTUNA_TABLES:
        few = ", ".join(sorted(names)[:3])
        raise Unusable(f"belongs to another program (its tables: {few}{' ...' if len(names) > 3 else ''})")
    return Meta.__tablename__ in names


def _server_has_tables(url: str) -> bool:
    engine = create_engine(url)
    try:
        return sqlalchemy.inspect(engine).has_table(Meta.__tablename__)
    finally:
        engine.dispose()


def _make_ready(engine: Engine, path: Path | None) -> None:
    """The tables of today, in a database that can be written. All in one transaction: of two processes one does it."""
    with writing(engine).begin() as connection:
        if not sqlalchemy.inspect(connection).has_table(Meta.__tablename__):
            Base.metadata.create_all(connection)
            connection.execute(insert(Meta).values(name="schema_version", value=str(SCHEMA_VERSION)))
            connection.execute(insert(Meta).values(**_DIGESTS))
        else:
            _check_version(connection)
            _replace_former_digests(connection)
            connection.execute(update(Meta).values(value=Meta.value))  # changes nothing: only a write tells that one can write
    if path:
        sqlite.use_wal(path)
        _watch(engine, path)


def _replace_former_digests(connection: Connection) -> None:
    """Writes today's digests over former ones of the same code, once for each database: keys of winners contain them."""
    if connection.scalar(select(Meta.value).where(Meta.name == _DIGESTS["name"])):
        return
    for table in (TrialRow, WinnerRow):
        column = table.kernel_digest
        connection.execute(update(table).where(column.in_(CURRENT)).values(kernel_digest=case(CURRENT, value=column)))
    connection.execute(insert(Meta).values(**_DIGESTS))


def _check_version(connection: Connection) -> None:
    """Raises Unusable for tables of another schema version than ours, older or newer."""
    said = connection.scalar(select(Meta.value).where(Meta.name == "schema_version"))
    if said == str(SCHEMA_VERSION):
        return
    if not (isinstance(said, str) and said.isdecimal()):
        raise Unusable(f"does not tell its schema version (it says {said!r})")
    told = f"has schema version {said[:9]}, made by another version of autotax; this one knows version {SCHEMA_VERSION}"
    raise Unusable(told, "`autotax export` its winners with that version and `autotax import` them here")


def _sqlite_engine(path: Path, *, writes: bool) -> Engine:
    engine = create_engine("sqlite://", creator=lambda: sqlite.connect(path, writes=writes), poolclass=QueuePool)
    return _with_one_writer(engine)


def _with_one_writer(engine: Engine) -> Engine:
    file = engine.dialect.name == "sqlite"
    plain = "BEGIN" if file else None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        locks = _writes(connection) and (file or connection.get_execution_options()["autotax_alone"])
        if statement := _ONE_WRITER.get(engine.dialect.name) if locks else plain:
            connection.exec_driver_sql(statement)

    return engine


def _watch(engine: Engine, path: Path) -> None:
    """Stops writers when the file or its log is removed or replaced: who has it open would go on writing to what nobody
    will find again. A connection keeps to the log that it found first; one that is opened after all were closed finds another.
    """

    @event.listens_for(engine, "begin")
    def check(connection: Connection) -> None:
        if _writes(connection):
            now = sqlite.identity(path)
            if connection.info.setdefault("autotax_files", now) != now:
                raise Unusable("or its log was removed or replaced while in use", "put it back")


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("autotax_writes"))
