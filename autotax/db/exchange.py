"""FILES of winners, to share: one JSON document that tells of each who tuned it, when, where, with what, and the samples.

Whoever reads one believes nothing: what `write` would not have made is a UsageError of one line.
"""

from __future__ import annotations

import getpass
import json
import platform
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from autotax.core.errors import UsageError
from autotax.core.files import write_whole
from autotax.core.validation import Malformed, from_json, read_bytes
from autotax.db.file_format import entry_from_json
from autotax.db.ranking import Entry

FORMAT, VERSION = "autotax winners", 2


def me() -> str:
    """user@host"""
    try:
        return f"{getpass.getuser()}@{platform.node()}"
    except (KeyError, OSError):  # a user without a name, as in many containers
        return f"unknown@{platform.node()}"


def write(path: Path, entries: Iterable[Entry], *, anonymous: bool = False) -> None:
    """Writes entries to a file, whole or not at all. Those that do not say who tuned them were tuned by this user."""
    by = None if anonymous else me()
    signed = [replace(entry, by=None if anonymous else entry.by or by) for entry in entries]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "exported_by": by,
        "winners": [entry.to_dict() for entry in signed],
    }
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> list[Entry]:
    """The entries of a file, which gzip or xz may have compressed.

    Raises UsageError, of one line, for what is not such a file in all its parts.
    """
    try:
        document = from_json(read_bytes(path), dict[str, msgspec.Raw])
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})")
    except Malformed as error:
        _refuse(path, f"is no export of autotax ({error})")
    if _field(document, "format") != FORMAT:
        _refuse(path, "is not an export of autotax")
    if (version := _field(document, "version")) != VERSION or type(version) is not int:
        known = f"is of version {str(version)[:20]!r}, this autotax reads version {VERSION}"
        _refuse(path, known, "export with the autotax that knows both, or ")
    try:
        winners = from_json(document.get("winners", b"null"), list[msgspec.Raw])
    except Malformed:
        _refuse(path, "has no list of winners")
    return [_entry(path, number, text) for number, text in enumerate(winners, 1)]


def _field(document: dict[str, msgspec.Raw], name: str) -> Any:
    try:
        return from_json(document.get(name, b"null"), str | int | None)  # type: ignore[arg-type]
    except Malformed:
        return None


def _entry(path: Path, number: int, text: msgspec.Raw) -> Entry:
    try:
        return entry_from_json(text)
    except (Malformed, UsageError) as error:
        _refuse(path, f"is malformed at winner {number}: {error}")


def _refuse(path: Path, what: str, remedy: str = "") -> NoReturn:
    raise UsageError(f"file {path} {' '.join(what.split())}; nothing was taken from it: {remedy}give a file of `autotax export`")
