"""LAST WORDS of runs whose database did not take them, being locked, full or gone: small files that the next run reads into it.

Without them a run that the database ended would look like one that was killed.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import platformdirs

from autotax.core.statuses import ENDINGS
from autotax.db.url import identity, sqlite_path


def leave(url: str, run_id: int, status: str) -> None:
    """Notes how a run ended. A full disk may refuse that too; then the run is taken for killed."""
    place = _place(url)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_name(f"{place.name}.run-{run_id}.{status}").touch()  # empty, for which a full disk often has room


def left(url: str) -> list[tuple[Path, int, str]]:
    """The files that are there, each with the run and the status that it tells."""
    place = _place(url)
    named = re.compile(re.escape(place.name) + rf"\.run-(\d+)\.({'|'.join(ENDINGS)})")
    matches = [(path, named.fullmatch(path.name)) for path in place.parent.glob("*.run-*.*")]
    return [(path, int(match[1]), match[2]) for path, match in matches if match]


def _place(url: str) -> Path:
    """Beside a SQLite file; of a server in the user's data folder, where the runs of this machine find it."""
    return sqlite_path(url) or platformdirs.user_data_path("autotax") / identity(url)
