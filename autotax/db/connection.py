"""Opens databases, after a look at SQLite files without side effects, and turns their errors into one line."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection, Engine, QueuePool, StaticPool, case, create_engine, delete, event, insert, select, update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from autotax.core.decoding import Malformed
from autotax.core.errors import MachineError, UsageError
from autotax.db.schema import CURRENT, PREFIX, SCHEMA_VERSION, Base, Meta, TrialRow, WinnerRow
from autotax.db.url import ELSEWHERE, shown, sqlite_path, without_secrets

# Errors. A database that cannot be opened is a UsageError, because the user named it. A full or failing disk, and failures during
# a run, are MachineErrors; the same command later goes on from the stored state.

_AGAIN = "run the same command again; what was measured so far is kept"
_BUGS = (IntegrityError, DataError)


class Unusable(Exception):
    """Describes a defect of a database in a few words that follow its name, and a remedy."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


class DatabaseBusy(MachineError):
    """Another process kept the database locked for longer than the timeout. The same call may succeed a little later."""


@contextmanager
def opening(url: str) -> Iterator[None]:
    """Turns errors of a database or its driver into a UsageError or, of a disk, a MachineError. Violated constraints pass."""
    try:
        yield
    except Exception as error:
        _refuse_rows(url, error)
        if isinstance(error, Unusable):
            remedies = ", or ".join(filter(None, [error.remedy, ELSEWHERE]))
            raise UsageError(f"database {shown(url)} {error}: {remedies}") from None
        if (complaint := _complaint(url, error)) is None:
            raise
        if "disk is full" in complaint or "disk I/O error" in complaint:
            raise MachineError(f"database {shown(url)} {_failed(complaint)}, or {ELSEWHERE}") from error
        raise UsageError(f"database {shown(url)} {_unopened(complaint)}") from error


@contextmanager
def failing(url: str) -> Iterator[None]:
    """Turns errors of an open database, of Optuna's storage too, into a MachineError, or a DatabaseBusy if waiting helps."""
    try:
        yield
    except Exception as error:
        _refuse_rows(url, error)
        if isinstance(error, Unusable):
            raise MachineError(f"database {shown(url)} {error}: {error.remedy} and {_AGAIN}") from None
        if (complaint := _complaint(url, error)) is None:
            raise
        if _is_busy(complaint):
            raise DatabaseBusy(f"database {shown(url)} is kept locked by another process: end that one and {_AGAIN}") from error
        raise MachineError(f"database {shown(url)} {_failed(complaint)} and {_AGAIN}") from error


def _refuse_rows(url: str, error: Exception) -> None:
    """Raises a UsageError for a malformed row: a row that this program did not write is bad input at any time."""
    if isinstance(error, Malformed):
        complaint = f"holds a row that is malformed ({error})"
        raise UsageError(f"database {shown(url)} {complaint}: mend or remove it, or {ELSEWHERE}") from None


def _complaint(url: str, error: BaseException | None) -> str | None:
    """The message of a database or its driver, on one line. None if the error has another source, or is a bug of this package."""
    if type(error).__name__ == "StorageInternalError":  # an error of Optuna, which is not imported just for this class
        error = error and error.__cause__
    if isinstance(error, DBAPIError) and not isinstance(error, _BUGS):
        error = error.orig
    elif not isinstance(error, sqlite3.Error):
        return None
    return " ".join(without_secrets(url, str(error)).split())[:300]


def _is_busy(message: str) -> bool:
    return "locked" in message


def _unopened(message: str) -> str:
    if _is_busy(message):
        return f"is kept locked by another process: end that one, or {ELSEWHERE}"
    if "readonly" in message or "unable to open" in message:
        return f"cannot be written ({message}); it needs a writable file and folder: {ELSEWHERE}"
    return f"cannot be used ({message}): mend it, or {ELSEWHERE}"


def _failed(message: str) -> str:
    if "disk is full" in message:
        return f"cannot be written any more ({message}): free space on its disk"
    if "disk I/O error" in message:
        return f"cannot be written any more ({message}): see that its disk works and has space"
    return f"cannot be used any more ({message}): mend it"


# SQLite files. A path can name any file, and a connection that may write would create files next to another program's database.

BUSY_SECONDS = 30.0

_LOG_BYTES = 2**16
_MAGIC = b"SQLite format 3\0"
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def table_names(path: Path) -> set[str]:
    """The tables of a SQLite file; none if there is no file, or an empty one. Raises Unusable."""
    if _head(_beside(path, "-journal")).startswith(_JOURNAL_MAGIC):
        # Another process is writing, or was killed while writing. Then only a process with write permission can recover the file.
        return _read_table_names(path, "mode=rw")
    header = _head(path)
    if not header:
        return set()
    if not header.startswith(_MAGIC):
        raise Unusable("is not a SQLite database")
    if _beside(path, "-wal").exists():
        return _read_table_names(path, "mode=ro", despite_full_disk=True)
    if path.stat().st_size < _full_size(header):
        raise Unusable("is a SQLite database cut short")
    try:
        # No process has the file open, so it does not change now. Without `immutable`, SQLite would leave a log next to it.
        return _read_table_names(path, "mode=ro&immutable=1")
    except Unusable:
        if not _beside(path, "-wal").exists():
            raise
        return _read_table_names(path, "mode=ro", despite_full_disk=True)  # another process opened it just now


def may_write(path: Path) -> bool:
    """False if permissions or a read-only disk forbid writing. True is no guarantee; only a write can show it."""
    effective = os.access in os.supports_effective_ids
    return all(os.access(place, os.W_OK, effective_ids=effective) for place in (path, path.parent))


def create_file(path: Path) -> None:
    """Creates an empty database file if none exists. Raises Unusable."""
    if path.exists() and not may_write(path):
        raise Unusable("cannot be written; it needs a writable file and folder")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _uncreated(error, f"cannot be created: no folder {path.parent}") from None
    try:
        path.touch(mode=0o600)  # whoever may read a database can also lock it
    except OSError as error:
        raise _uncreated(error, "cannot be created") from None


def connect_file(path: Path, *, writes: bool) -> sqlite3.Connection:
    """A connection whose transactions SQLAlchemy controls. It creates no file: one that vanishes must not come back empty."""
    if writes:
        return _connect(path, "mode=rw")
    # Even readers create a WAL file and remove it again. Without write permission or space this fails, or leaves a log that the
    # next reader cannot open. Then the file is opened as immutable. Unlike "ro", "rw" removes its log.
    alone = not (may_write(path) and _has_room(path)) and not _beside(path, "-wal").exists()
    connection = _connect(path, "mode=ro&immutable=1" if alone else "mode=rw")
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if not _takes_no_log(error):
            raise
        connection = _connect_without_log(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def use_wal(path: Path) -> None:
    """Switches the file to WAL mode, for good: readers and one writer at a time do not wait for each other."""
    deadline = time.monotonic() + BUSY_SECONDS
    connection = _connect(path, "mode=rw")
    try:
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
                return
            except sqlite3.OperationalError:  # the switch ignores the busy timeout
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    finally:
        connection.close()


def identity(path: Path) -> tuple[int | None, ...]:
    """Identifies a database file and its log, so that a replacement of either is noticed."""
    return tuple(file.stat().st_ino if file.exists() else None for file in (path, _beside(path, "-wal")))


def _connect(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,  # else Python begins transactions itself, but not before SELECT or CREATE TABLE
        check_same_thread=False,  # the pool hands a connection to one thread at a time
    )
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _uncreated(error: OSError, what: str) -> Exception:
    """The error of a failed file creation. A full disk gives the same error as in SQLite."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return sqlite3.OperationalError("database or disk is full")
    return Unusable(f"{what} ({error.strerror})")


def _has_room(path: Path) -> bool:
    """Whether the disk has room for a log and its index. Quotas cannot be checked in advance."""
    disk = os.statvfs(path.parent)
    return disk.f_bavail * disk.f_frsize >= _LOG_BYTES


def _takes_no_log(error: sqlite3.DatabaseError) -> bool:
    return any(sign in str(error) for sign in ("full", "I/O", "unable to open"))


def _connect_without_log(path: Path) -> sqlite3.Connection:
    """A connection for readers on a full disk: exclusive if the file has a log, else as immutable."""
    logged = _beside(path, "-wal").exists() and _beside(path, "-wal").stat().st_size > 0
    connection = _connect(path, "mode=rw" if logged else "mode=ro&immutable=1")
    if logged:  # then SQLite keeps the index of the log in memory
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _head(path: Path) -> bytes:
    """The first bytes of a file, none if it is not there."""
    try:
        if path.exists() and not path.is_file():
            raise Unusable("is not a file")
        with path.open("rb") as file:
            return file.read(100)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise Unusable(f"cannot be read ({error.strerror})") from None


def _full_size(header: bytes) -> int:
    page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    return max(len(_MAGIC), (65536 if page == 1 else page) * pages)


def _read_table_names(path: Path, options: str, *, despite_full_disk: bool = False) -> set[str]:
    try:
        connection = _connect(path, options)
        try:
            return _names(connection)
        except sqlite3.OperationalError as error:
            if not (despite_full_disk and _takes_no_log(error)):
                raise
        finally:
            connection.close()
        connection = _connect_without_log(path)
        try:
            return _names(connection)
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        raise Unusable(f"cannot be read as a SQLite database ({error})") from None


def _names(connection: sqlite3.Connection) -> set[str]:
    """The names of the tables. Raises Unusable for views of such names and for triggers, which run code of whoever made them."""
    rows = list(connection.execute("SELECT type, name FROM sqlite_master"))
    for kind, name in rows:
        if kind == "trigger" or (kind == "view" and (str(name).startswith(PREFIX) or name in _OPTUNA_TABLES)):
            raise Unusable(f"has a {kind} named {str(name)[:40]!r}, which autotax does not make", f"drop it, or {ELSEWHERE}")
    return {name for kind, name in rows if kind == "table"}


# Opens a database. It is checked before any change, gets the tables of the current schema, and has one writer at a time.

_OPTUNA_TABLES = {"studies", "version_info"}  # the first ones that Optuna creates

_DIGESTS = {"name": "digests", "value": f"by content, {zlib.crc32(repr(CURRENT).encode()):08x}"}
"""The row of `Meta` that says that no digest of these `FORMER` ones is left in the tables."""

_LOCK = 0x6175746F746178  # "autotax" in ASCII
_ONE_WRITER = {"sqlite": "BEGIN IMMEDIATE", "postgresql": f"SELECT pg_advisory_xact_lock({_LOCK})"}


def open_engine(url: str, *, create: bool) -> Engine | None:
    """An engine on the autotax tables at a resolved `url`.

    With `create`, the database and its tables are created if they are missing, and the database must be writable. Without
    `create` nothing is written, and the result is None if there are no autotax tables. Tables of another schema version are
    refused.
    """
    with opening(url):
        path = sqlite_path(url)
        if not (_file_has_tables(path) if path else _server_has_tables(url)) and not create:
            return None
        if path and create:
            create_file(path)
        if path:
            engine = create_engine("sqlite://", creator=lambda: connect_file(path, writes=create), poolclass=QueuePool)
        else:
            engine = create_engine(url)
        _let_one_write(engine)
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
    """An engine with empty tables in memory."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    Base.metadata.create_all(engine)
    return engine


def writing(engine: Engine, *, alone: bool = True) -> Engine:
    """The engine for transactions that write. Each waits for the write lock when it begins.

    A transaction that reads first and requests the lock later is aborted if another process wrote in between. On a server, a
    transaction takes several round trips. There, transactions on the rows of a single run need not be `alone`, because a run has
    one writer. A file always has one writer at a time.
    """
    return engine.execution_options(autotax_writes=True, autotax_alone=alone)


def _file_has_tables(path: Path) -> bool:
    names = table_names(path)
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
    """Creates the tables if need be and checks that the database is writable, in one transaction: of two processes one works."""
    with writing(engine).begin() as connection:
        if not sqlalchemy.inspect(connection).has_table(Meta.__tablename__):
            Base.metadata.create_all(connection)
            connection.execute(insert(Meta).values(name="schema_version", value=str(SCHEMA_VERSION)))
            connection.execute(insert(Meta).values(**_DIGESTS))
        else:
            _check_version(connection)
            _replace_former_digests(connection)
            connection.execute(update(Meta).values(value=Meta.value))  # proves that the database is writable
    if path:
        use_wal(path)
        _watch(engine, path)


def _replace_former_digests(connection: Connection) -> None:
    """Translates former digests of kernels into current ones, once for each database and set of former digests.

    Keys of winners contain digests. Of winners whose keys become equal, the one with the latest digest stays.
    """
    of_digests = Meta.name == _DIGESTS["name"]
    if connection.scalar(select(Meta.value).where(of_digests)) == _DIGESTS["value"]:
        return
    column = TrialRow.kernel_digest
    connection.execute(update(TrialRow).where(column.in_(CURRENT)).values(kernel_digest=case(CURRENT, value=column)))
    others = WinnerRow.__table__.alias()
    alike = [others.c[key.name] == key for key in WinnerRow.__table__.primary_key if key.name != "kernel_digest"]
    for former, current in reversed(CURRENT.items()):
        formers = WinnerRow.kernel_digest == former
        newer = select(others.c.world_size).where(others.c.kernel_digest == current, *alike).exists()
        connection.execute(delete(WinnerRow).where(formers, newer))
        connection.execute(update(WinnerRow).where(formers).values(kernel_digest=current))
    connection.execute(delete(Meta).where(of_digests))
    connection.execute(insert(Meta).values(**_DIGESTS))


def _check_version(connection: Connection) -> None:
    """Raises Unusable for tables of another schema version than ours, older or newer."""
    version = connection.scalar(select(Meta.value).where(Meta.name == "schema_version"))
    if version == str(SCHEMA_VERSION):
        return
    if not (isinstance(version, str) and version.isdecimal()):
        raise Unusable(f"does not tell its schema version (it says {version!r})")
    complaint = f"has schema version {version[:9]}, made by another version of autotax; this one knows version {SCHEMA_VERSION}"
    raise Unusable(complaint, "`autotax export` its winners with that version and `autotax import` them here")


def _let_one_write(engine: Engine) -> None:
    file = engine.dialect.name == "sqlite"
    plain = "BEGIN" if file else None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        locks = _writes(connection) and (file or connection.get_execution_options()["autotax_alone"])
        if statement := _ONE_WRITER.get(engine.dialect.name) if locks else plain:
            connection.exec_driver_sql(statement)


def _watch(engine: Engine, path: Path) -> None:
    """Stops writers when the file or its log is removed or replaced, because they would go on writing to a deleted file. A
    connection keeps the log that it opened first. A connection opened after all others were closed gets a new log.
    """

    @event.listens_for(engine, "begin")
    def check(connection: Connection) -> None:
        if _writes(connection):
            now = identity(path)
            if connection.info.setdefault("autotax_files", now) != now:
                raise Unusable("or its log was removed or replaced while in use", "put it back")


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("autotax_writes"))
