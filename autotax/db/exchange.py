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

from autotax.db.evidence import Entry
from autotax.db.portable import Malformed, entry_from_dict
from autotax.errors import UsageError
from autotax.files import write_whole

FORMAT, VERSION = "autotax winners", 2
READ = (1, VERSION)
"""Version 1 told one digest of all kernel sources, and none of those of a variant."""


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
    """The entries of a file. Raises UsageError, of one line, for what is not such a file in all its parts."""
    document = _document(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _refuse(path, "is not an export of autotax")
    if (version := document.get("version")) not in READ:
        known = " and ".join(map(str, READ))
        _refuse(path, f"is of version {version!r}, this autotax reads versions {known}", "upgrade autotax, or ")
    if not isinstance(winners := document.get("winners"), list):
        _refuse(path, "has no list of winners")
    return [_entry(path, version, number, values) for number, values in enumerate(winners, 1)]


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), parse_constant=_no_number)
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})")
    except (ValueError, RecursionError) as error:
        _refuse(path, f"is not JSON ({error})")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _entry(path: Path, version: int, number: int, values: object) -> Entry:
    try:
        return entry_from_dict(values, version)
    except (Malformed, UsageError) as error:
        _refuse(path, f"is malformed at winner {number}: {error}")


def _refuse(path: Path, what: str, remedy: str = "") -> NoReturn:
    raise UsageError(f"file {path} {' '.join(what.split())}; nothing was taken from it: {remedy}give a file of `autotax export`")
