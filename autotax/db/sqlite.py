"""SQLite files: what a file is before anything is written to it, and how it is opened.

A path can name anything. `table_names` tells what, without leaving a trace: a connection that may write would add files
beside another program's database.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from pathlib import Path

from autotax.db.errors import Unusable

BUSY_SECONDS = 30.0

_LOG_BYTES = 2**16
_MAGIC = b"SQLite format 3\0"
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def table_names(path: Path) -> set[str]:
    """The tables of a SQLite file; none if there is no file, or an empty one. Raises Unusable."""
    if _head(_beside(path, "-journal")).startswith(_JOURNAL_MAGIC):
        # Somebody is writing, or was killed while writing: then only who may write can put the file back in order.
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
        # Nobody has it open, so it does not change under us; without `immutable` SQLite would leave a log beside it.
        return _read_table_names(path, "mode=ro&immutable=1")
    except Unusable:
        if not _beside(path, "-wal").exists():
            raise
        return _read_table_names(path, "mode=ro", despite_full_disk=True)  # somebody opened it just now


def may_write(path: Path) -> bool:
    """False if permissions or a read-only disk forbid it; True is no promise, only a write tells."""
    effective = os.access in os.supports_effective_ids
    return all(os.access(each, os.W_OK, effective_ids=effective) for each in (path, path.parent))


def create(path: Path) -> None:
    """Makes an empty file, which is an empty database, unless there is a file. Raises Unusable."""
    if path.exists() and not may_write(path):
        raise Unusable("cannot be written; it needs a writable file and folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _uncreated(error, f"cannot be created: no folder {path.parent}") from None
    try:
        path.touch()
    except OSError as error:
        raise _uncreated(error, "cannot be created") from None


def connect(path: Path, *, writes: bool) -> sqlite3.Connection:
    """A connection whose transactions begin and end where SQLAlchemy says so. Never makes a file that is not there: one
    that vanishes under a run must not come back empty.
    """
    if writes:
        return _connect(path, "mode=rw")
    # Reading, too, takes a log, made and removed again. Who may not write, or has no room, would fail to make it, or leave
    # behind one that the next reader cannot open, and so reads the file alone; unlike "ro", "rw" removes its log.
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
    """Readers and one writer at a time that do not wait for each other. The file remembers it."""
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
    """Tells a database, and the log of who has it open, from others that take their places."""
    return tuple(each.stat().st_ino if each.exists() else None for each in (path, _beside(path, "-wal")))


def _connect(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,  # else Python begins transactions by itself, and not before a SELECT or a CREATE TABLE
        check_same_thread=False,  # the pool hands a connection to one thread at a time
    )
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _uncreated(error: OSError, what: str) -> Exception:
    """A full disk is told as SQLite tells it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return sqlite3.OperationalError("database or disk is full")
    return Unusable(f"{what} ({error.strerror})")


def _has_room(path: Path) -> bool:
    """Whether the disk takes a log and its index; that of a quota is not known before."""
    told = os.statvfs(path.parent)
    return told.f_bavail * told.f_frsize >= _LOG_BYTES


def _takes_no_log(error: sqlite3.DatabaseError) -> bool:
    return any(sign in str(error) for sign in ("full", "I/O", "unable to open"))


def _connect_without_log(path: Path) -> sqlite3.Connection:
    """For readers of a full disk: a file without a log, or with an empty one, is read as it is; one with a log alone."""
    logged = _beside(path, "-wal").exists() and _beside(path, "-wal").stat().st_size > 0
    connection = _connect(path, "mode=rw" if logged else "mode=ro&immutable=1")
    if logged:  # the index of the log is in memory then
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
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
