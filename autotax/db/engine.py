"""OPENING a database: checked before it is touched, with our tables in it, one writer at a time.

Whatever is wrong with what the user named comes out as a UsageError of one line, and leaves everything as it was.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection, Engine, QueuePool, StaticPool, create_engine, event, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from autotax.db import sqlite
from autotax.db.schema import PREFIX, SCHEMA_VERSION, Base, Meta
from autotax.db.url import VARIABLE, shown, sqlite_path
from autotax.errors import UsageError

_ELSEWHERE = f"give another --db or {VARIABLE}"
_OPTUNA_TABLES = {"studies", "version_info"}  # the first ones that Optuna creates

_LOCK = 0x6175746F746178  # "autotax" in ASCII
_ONE_WRITER = {"sqlite": "BEGIN IMMEDIATE", "postgresql": f"SELECT pg_advisory_xact_lock({_LOCK})"}


def open_engine(url: str, *, create: bool) -> Engine | None:
    """An engine on the autotax tables at a resolved `url`.

    With `create` the database and its tables are made if they are not there, and it must be writable. Without, nothing
    is written, and the answer is None where there are no autotax tables.
    """
    with one_line(url):
        path = sqlite_path(url)
        if not (_file_has_tables(path) if path else _server_has_tables(url)) and not create:
            return None
        if path and create:
            _make_room(path)
        engine = _sqlite_engine(path, create) if path else _with_one_writer(create_engine(url))
        try:
            with (writing(engine) if create else engine).begin() as connection:
                version = _known_version(connection, url)
                if create:
                    _create_or_try(connection, version)
            if path and create:
                sqlite.use_wal(path)
        except BaseException:
            engine.dispose()
            raise
        return engine


def empty_engine() -> Engine:
    """The tables with nothing in them, in memory."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    Base.metadata.create_all(engine)
    return engine


def writing(engine: Engine) -> Engine:
    """The same engine for transactions that write: each waits for its turn when it begins.

    A transaction that reads first and asks for the lock later is thrown out if somebody wrote in between.
    """
    return engine.execution_options(autotax_writes=True)


@contextmanager
def one_line(url: str) -> Iterator[None]:
    """What the database or its driver complains of, as one line. Broken constraints pass through: they are bugs."""
    try:
        yield
    except sqlite.Unusable as error:
        raise UsageError(f"database {shown(url)} {error}: {_ELSEWHERE}") from None
    except IntegrityError:
        raise
    except DBAPIError as error:
        raise UsageError(_complaint(url, error.orig)) from error
    except sqlite3.Error as error:
        raise UsageError(_complaint(url, error)) from error


def _complaint(url: str, error: BaseException | None) -> str:
    said = " ".join(str(error).split())
    if "locked" in said:
        return f"database {shown(url)} is kept locked by another process: end that one, or {_ELSEWHERE}"
    if "readonly" in said or "unable to open" in said:
        return f"database {shown(url)} cannot be written ({said}); it needs a writable file and folder: {_ELSEWHERE}"
    return f"database {shown(url)} cannot be used ({said[:300]}): mend it, or {_ELSEWHERE}"


def _file_has_tables(path: Path) -> bool:
    names = sqlite.table_names(path)
    ours = any(name.startswith(PREFIX) for name in names)
    if names and not ours and not names & _OPTUNA_TABLES:
        few = ", ".join(sorted(names)[:3])
        raise sqlite.Unusable(f"belongs to another program (its tables: {few}{' ...' if len(names) > 3 else ''})")
    return Meta.__tablename__ in names


def _server_has_tables(url: str) -> bool:
    engine = create_engine(url)
    try:
        return sqlalchemy.inspect(engine).has_table(Meta.__tablename__)
    finally:
        engine.dispose()


def _make_room(path: Path) -> None:
    if path.exists() and not sqlite.may_write(path):
        raise sqlite.Unusable("cannot be written; it needs a writable file and folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise sqlite.Unusable(f"cannot be created: no folder {path.parent} ({error.strerror})") from None


def _create_or_try(connection: Connection, version: int | None) -> None:
    """Makes the tables; where they exist, changes nothing in earnest, for only a write tells that one can write."""
    if version is not None:
        connection.execute(update(Meta).values(value=Meta.value))
        return
    Base.metadata.create_all(connection)
    connection.execute(insert(Meta).values(name="schema_version", value=str(SCHEMA_VERSION)))


def _known_version(connection: Connection, url: str) -> int | None:
    """The schema version of the database, None if it has no autotax tables yet. Refuses a newer one."""
    if not sqlalchemy.inspect(connection).has_table(Meta.__tablename__):
        return None
    version = int(connection.scalar(select(Meta.value).where(Meta.name == "schema_version")) or 0)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"database {shown(url)} has schema version {version}; this autotax knows versions up to {SCHEMA_VERSION}: "
            f"upgrade autotax, or {_ELSEWHERE}"
        )
    return version


def _sqlite_engine(path: Path, create: bool) -> Engine:
    engine = create_engine("sqlite://", creator=lambda: sqlite.connect(path, create=create), poolclass=QueuePool)
    return _with_one_writer(engine)


def _with_one_writer(engine: Engine) -> Engine:
    plain = "BEGIN" if engine.dialect.name == "sqlite" else None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("autotax_writes")
        if statement := _ONE_WRITER.get(engine.dialect.name) if writes else plain:
            connection.exec_driver_sql(statement)

    return engine
