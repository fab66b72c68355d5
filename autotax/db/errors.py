"""Errors of a database, as one line.

A database that cannot be opened is a UsageError, because the user named it. A full or failing disk, and failures during a run,
are MachineErrors; the same command later goes on from the stored state.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from autotax.core.errors import MachineError, UsageError
from autotax.core.files import Malformed
from autotax.db.url import VARIABLE, shown, without_secrets

ELSEWHERE = f"give another --db or {VARIABLE}"
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
    """Turns errors of a database or its driver into a UsageError, or into a MachineError if the disk is the cause. Violated
    constraints pass through: they are bugs.
    """
    try:
        yield
    except Exception as error:
        _refuse_rows(url, error)
        if isinstance(error, Unusable):
            remedies = ", or ".join(filter(None, [error.remedy, ELSEWHERE]))
            raise UsageError(f"database {shown(url)} {error}: {remedies}") from None
        if (complaint := _complaint(url, error)) is None:
            raise
        if _is_disk(complaint):
            raise MachineError(f"database {shown(url)} {_failed(complaint)}, or {ELSEWHERE}") from error
        raise UsageError(f"database {shown(url)} {_unopened(complaint)}") from error


@contextmanager
def failing(url: str) -> Iterator[None]:
    """Turns errors of an open database into a MachineError, or into a DatabaseBusy if waiting helps.

    This covers errors of the store and of Optuna's storage, which wraps the error of the database. Bugs pass through.
    """
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


def _is_busy(said: str) -> bool:
    return "locked" in said


def _is_disk(said: str) -> bool:
    return "disk is full" in said or "disk I/O error" in said


def _unopened(said: str) -> str:
    if _is_busy(said):
        return f"is kept locked by another process: end that one, or {ELSEWHERE}"
    if "readonly" in said or "unable to open" in said:
        return f"cannot be written ({said}); it needs a writable file and folder: {ELSEWHERE}"
    return f"cannot be used ({said}): mend it, or {ELSEWHERE}"


def _failed(said: str) -> str:
    if "disk is full" in said:
        return f"cannot be written any more ({said}): free space on its disk"
    if "disk I/O error" in said:
        return f"cannot be written any more ({said}): see that its disk works and has space"
    return f"cannot be used any more ({said}): mend it"
