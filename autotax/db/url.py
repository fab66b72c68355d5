"""Resolves a URL, a path or nothing to one SQLAlchemy URL."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import quote, quote_plus

import platformdirs
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from autotax.core.errors import UsageError

VARIABLE = "AUTOTAX_DB"
HIDDEN = "***"
_ALLOWED = "allowed are a path or a URL such as sqlite:////PATH or postgresql+psycopg://USER@HOST/NAME"
ELSEWHERE = f"give another --db or {VARIABLE}"


def default_url() -> str:
    """The database when none is named: $AUTOTAX_DB (a URL or a path), else a SQLite file in the user's data folder."""
    if variable := os.environ.get(VARIABLE):
        return resolve_url(variable)
    try:
        Path.home()
    except RuntimeError:  # a user without a home has no database, but may use the shipped winners
        return _file_url(Path("/proc/no-home/autotax.db"))  # no file can be created there
    return _file_url(platformdirs.user_data_path("autotax") / "autotax.db")


def resolve_url(text: str | os.PathLike[str] | None) -> str:
    """Converts a URL, a plain path or None (the default) to a URL, without opening it. Raises UsageError for other texts."""
    if text is None:
        return default_url()
    if isinstance(text, str) and "://" in text:
        return _checked_url(text)
    text = os.fspath(text)
    if not text or text == ":memory:" or "\0" in text:
        raise UsageError(f"database is {text!r}, which names no file; {_ALLOWED}: {ELSEWHERE}")
    if re.match(r"[A-Za-z][\w+]+:/", text):
        raise UsageError(f"database is {text.partition(':')[0]}:/..., a URL that lacks a slash; {_ALLOWED}: {ELSEWHERE}")
    return _file_url(Path(text))


def sqlite_path(url: str) -> Path | None:
    """The file behind a resolved SQLite URL, None for any other database."""
    parsed = make_url(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def shown(url: str) -> str:
    """The name of a database in messages, in one line. SQLite databases are named by their file. Other URLs are shown without
    their password and without the values of options, which may be secrets too.
    """
    return " ".join(str(sqlite_path(url) or public(make_url(url))).split("\n"))


def without_secrets(url: str, text: str) -> str:
    """A driver's message about the database at a URL, with `***` in place of the secrets of the URL."""
    parsed = make_url(url)
    options = (value for values in parsed.query.values() for value in ([values] if isinstance(values, str) else values))
    for secret in sorted({str(parsed.password or ""), *options} - {""}, key=len, reverse=True):
        for spelled in (secret, quote(secret, safe=""), quote_plus(secret)):
            text = text.replace(spelled, HIDDEN)
    return text


def identity(url: str) -> str:
    """Identifies a server's database, for use in file names."""
    return hashlib.sha256(make_url(url).render_as_string(hide_password=True).encode()).hexdigest()[:16]


def public(url: URL) -> str:
    """A URL without its password and the values of its options."""
    options = "&".join(f"{quote(name)}={HIDDEN}" for name in url.query)
    return url.set(query={}).render_as_string(hide_password=True) + (f"?{options}" if options else "")


def named(url: str) -> str:
    """The name of the database in shared files. For a database file it is the file name without the author's folders."""
    path = sqlite_path(url)
    return path.name if path else shown(url)


def _file_url(path: Path) -> str:
    """The URL of the file after following links, because SQLite keeps its log next to the target."""
    text = str(path)
    try:
        path = path.expanduser()
    except RuntimeError:
        raise UsageError(f"database is {text!r}, in the home of no user known here: {ELSEWHERE}") from None
    path = Path(os.path.realpath(path))  # unlike `resolve` it does not raise for a link to itself
    if not path.name:
        raise UsageError(f"database is {text!r}, which names no file; {_ALLOWED}: {ELSEWHERE}")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"database is {text!r}, whose path {str(path)!r} is not UTF-8: {ELSEWHERE}") from None
    url = URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)
    if make_url(url).database != str(path):  # before SQLAlchemy 2.1 a URL cannot contain a path with a `?`
        raise UsageError(f"database is {str(path)!r}, a path that no URL can spell; take out `?` and `%`: {ELSEWHERE}")
    return url


def _checked_url(text: str) -> str:
    kind = text.split("://")[0]
    try:
        text.encode()
        url = make_url(text)
        dialect = url.get_dialect()
        dialect.import_dbapi()
    except NoSuchModuleError:
        raise UsageError(f"database is of the unknown kind {kind!r}; {_ALLOWED}: {ELSEWHERE}") from None
    except ImportError as error:
        raise UsageError(
            f"database {shown(text)} needs the Python package {error.name!r}, which is not installed: "
            f"install it, or {ELSEWHERE}"
        ) from None
    except (ArgumentError, ValueError):
        raise UsageError(f"database URL {kind}://... cannot be read; {_ALLOWED}: {ELSEWHERE}") from None
    if dialect.is_async:
        raise UsageError(f"database {shown(text)} names an asynchronous driver; {_ALLOWED}: {ELSEWHERE}")
    if url.get_backend_name() != "sqlite":
        return url.render_as_string(hide_password=False)
    if url.host or url.query or url.get_driver_name() != "pysqlite" or (url.database or "").startswith("file:"):
        limitation = "SQLite has no host, driver or options here"
        raise UsageError(f"database is {public(url)!r}; {limitation}; {_ALLOWED}: {ELSEWHERE}")
    return resolve_url(url.database or "")
