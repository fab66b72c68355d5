"""SHIPPED winners: files of the package, in the format of `autotax export`. They need no database; the user's go first."""

from __future__ import annotations

import json
from pathlib import Path

from autotax.core.errors import UsageError
from autotax.db.exchange import read
from autotax.db.index import Known
from autotax.db.ranking import Entry, merge
from autotax.db.records import WinnerRecord
from autotax.db.staleness import Place

FOLDER = Path(__file__).parents[1] / "shipped"


def known_winners() -> list[Known]:
    """The best proven winner of each key."""
    return [_known(winner) for winner in winners()]


def winners() -> list[WinnerRecord]:
    """The shipped winners, with all that is known of each."""
    return [entry.winner for entry in merge(_files()[0]).values()]


def unreadable() -> str:
    """What is wrong with the files, in one line; empty if nothing is."""
    return _files()[1]


def _files() -> tuple[list[Entry], str]:
    """What can be read answers, whatever became of other files."""
    entries: list[Entry] = []
    wrong = ""
    for path in sorted(FOLDER.glob("*.json")):
        try:
            entries += read(path)
        except UsageError as error:
            wrong = wrong or f"shipped winners are not complete: {error}"
    return entries, wrong


def _known(winner: WinnerRecord) -> Known:
    return Known(
        winner.problem.key,
        Place(winner.hardware, winner.environment, winner.conditions),
        winner.kernel_digest,
        json.dumps(winner.config.to_dict()),
        winner.speedup,
        winner.interval_low,
        winner.interval_high,
        winner.tie,
        winner.trial_id,
    )
