"""MISSES: what a program asked for in vain. Counted in memory; written only when asked to, never while it computes.

A miss is the representative of a bucket, so that tuning it serves every size that was asked for.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.core.terminal import printable
from autotax.db.records import MissRecord
from autotax.db.store import Store
from autotax.db.url import resolve_url
from autotax.hardware import Hardware

VARIABLE = "AUTOTAX_MISSES"

_Missed = tuple[Problem, Hardware, Conditions]
_tallies: dict[str, dict[_Missed, Tally]] = {}
"""By the database that was asked."""


@dataclass(slots=True)
class Tally:
    """How often something was asked for since it was last saved, and when last (seconds since the epoch)."""

    count: int = 0
    last_asked: float = 0.0


def tally(url: str, problem: Problem, hardware: Hardware, conditions: Conditions) -> Tally:
    """Where to count a miss of the database at a resolved URL."""
    return _tallies.setdefault(url, {}).setdefault((problem, hardware, conditions), Tally())


def save_misses(db: str | Path | None = None) -> int:
    """Writes what was asked of the database `db` (default: yours) in vain since the last time; gives how many problems.

    Makes the database if it is not there. Raises UsageError or MachineError if it cannot be written; nothing is lost then.
    """
    return _save(resolve_url(db))


def _save(url: str) -> int:
    counted = [(key, tally, tally.count) for key, tally in list(_tallies.get(url, {}).items()) if tally.count]
    if not counted:
        return 0
    records = [MissRecord(*key, count, datetime.fromtimestamp(tally.last_asked, UTC)) for key, tally, count in counted]
    with Store.open(url) as store:
        store.add_misses(records)
    for _, tally, count in counted:  # what was asked meanwhile stays
        tally.count -= count
    return len(records)


@atexit.register
def _at_exit() -> None:
    """Into databases that are there, if the user wants it; a program that ends well must not fail for it."""
    if os.environ.get(VARIABLE) != "1":
        return
    for url in _tallies:
        try:
            with Store.open(url, create=False) as store:
                exists = store.exists
            if exists:
                _save(url)
        except Exception as error:
            print(f"autotax: misses are not saved: {' '.join(printable(str(error)).split())}", file=sys.stderr)
