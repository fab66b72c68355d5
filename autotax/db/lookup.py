"""Look-ups: the config to run for a problem, from the user's database and the shipped winners."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import time

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.core.terminal import printable
from autotax.db.answers import Answer, answer, invariant_answer, to_tune
from autotax.db.records import MissRecord, Place
from autotax.db.shipped import forget_sources, sources
from autotax.db.store import Store
from autotax.db.url import resolve_url
from autotax.hardware import Hardware, detect, require_problem
from autotax.software import environment

# Look-ups: the config to run for a problem here, and why. The database is read once, and answers are cached in a dict.

__all__ = ["Answer", "lookup", "peek", "reload", "save_misses"]

_MOST_KEPT = 2**16

_Asked = tuple[Problem, Hardware | None, str | Path | None, Conditions | None, bool]
_kept: dict[_Asked, tuple[Answer, Tally | None]] = {}


def lookup(
    problem: Problem,
    *,
    hardware: Hardware | None = None,
    db: str | Path | None = None,
    conditions: Conditions | None = None,
    allow_stale: bool = False,
    prove: bool | float = False,
) -> Answer:
    """The config to run for a problem. A missing winner or database raises no error.

    Answers are cached until `reload`: later winners or a changed $AUTOTAX_DB have no effect before.

    Args:
        problem: The problem of the calls.
        hardware: Where the calls run. Default: this machine.
        db: The database, a path or a URL. Default: yours.
        conditions: The conditions of the calls. Default: the usual ones on that hardware.
        allow_stale: Prefer a winner of this problem from other hardware or software to bulk-synchronous.
        prove: Prove a winner that is stale only in software again, on separate ranks. A number limits the seconds; True means
            $AUTOTAX_PROVE_S. Only for programs that do not use the GPUs yet; modules have their own `prove`.

    Returns:
        A config, with the reason for its choice: the winner of this problem, that of a size nearby, or bulk-synchronous.

    Raises:
        UsageError: Bad input, or a broken database.
    """
    if prove is not False:
        _prove(problem, _place(hardware, conditions), db, prove)
    answered = _kept.get((problem, hardware, db, conditions, allow_stale))
    if answered is None:
        answered = _ask((problem, hardware, db, conditions, allow_stale))
    config, miss = answered
    if miss is not None:
        miss.count += 1
        miss.last_asked = time()
    return config


def invariant(
    problem: Problem, *, hardware: Hardware | None = None, db: str | Path | None = None, conditions: Conditions | None = None
) -> Answer:
    """One config for all sizes up to those of the problem, whose rows do not depend on their number: see `invariant_answer`."""
    return invariant_answer(problem, _place(hardware, conditions), sources(db))


def peek(
    problem: Problem,
    *,
    hardware: Hardware | None = None,
    db: str | Path | None = None,
    conditions: Conditions | None = None,
) -> Answer:
    """Like `lookup`, without counting a miss; for callers that do not run the problem now."""
    return (_kept.get(question := (problem, hardware, db, conditions, False)) or _ask(question))[0]


def reload() -> None:
    """Forgets all answers and winners; the next look-up reads the database again. Misses stay counted."""
    _kept.clear()
    forget_sources()


def _place(hardware: Hardware | None, conditions: Conditions | None) -> Place:
    """The place of calls on this hardware (default: this machine), under these conditions (default: the usual ones)."""
    hardware = hardware or detect()
    return Place(hardware, environment(hardware.backend), conditions or Conditions.usual(hardware.on_gpu))


def _prove(problem: Problem, here: Place, db: str | Path | None, prove: bool | float) -> None:
    from autotax.db import reproof

    bound = reproof.bound_of(prove)
    if bound and (proof := reproof.prove(reproof.serving([problem]), here, db, bound)):
        if note := reproof.listed(proof.unproven):
            warnings.warn(note, RuntimeWarning, stacklevel=3)
        reload()


def _check(problem: object, hardware: object, db: object, conditions: object) -> None:
    """Raises UsageError for arguments of other types."""
    if not isinstance(problem, Problem):
        require_problem(problem)
    arguments: tuple[tuple[str, object, tuple[type, ...]], ...] = (
        ("hardware", hardware, (Hardware,)), ("db", db, (str, Path)), ("conditions", conditions, (Conditions,))
    )  # fmt: skip
    for name, value, kinds in arguments:
        if value is not None and not isinstance(value, kinds):
            taken = " or ".join(kind.__name__ for kind in kinds)
            raise UsageError(f"{name} is {value!r}; it must be of type {taken}: give one, or leave {name} out")


def _ask(question: _Asked) -> tuple[Answer, Tally | None]:
    problem, hardware, db, conditions, allow_stale = question
    _check(problem, hardware, db, conditions)
    here = _place(hardware, conditions)
    winners = sources(db)
    config = answer(problem, here, winners, allow_stale=allow_stale)
    untuned = to_tune(problem, here, winners)
    miss = tally(resolve_url(db), untuned, here.hardware, here.conditions) if untuned else None
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[question] = config, miss
    return config, miss


# Misses: look-ups without a winner, counted in memory and written only on request, never while a program computes. A miss names
# the representative of a bucket, so that tuning that problem serves every size that was looked up.

MISSES_VARIABLE = "AUTOTAX_MISSES"

_Missed = tuple[Problem, Hardware, Conditions]
_tallies: dict[str, dict[_Missed, Tally]] = {}
"""Counts of misses, by database."""


@dataclass(slots=True)
class Tally:
    """The number of look-ups since the last save, and the time of the latest (seconds since the epoch)."""

    count: int = 0
    last_asked: float = 0.0


def tally(url: str, problem: Problem, hardware: Hardware, conditions: Conditions) -> Tally:
    """The tally of a miss in the database at a resolved URL."""
    return _tallies.setdefault(url, {}).setdefault((problem, hardware, conditions), Tally())


def save_misses(db: str | Path | None = None) -> int:
    """Writes the misses since the last save to the database, which is created if it is missing.

    Args:
        db: The database, a path or a URL. Default: yours.

    Returns:
        The number of problems.

    Raises:
        UsageError, MachineError: The database cannot be written. The misses stay counted.
    """
    return _save(resolve_url(db))


def _save(url: str) -> int:
    counted = [(key, tally, tally.count) for key, tally in list(_tallies.get(url, {}).items()) if tally.count]
    if not counted:
        return 0
    records = [MissRecord(*key, count, datetime.fromtimestamp(tally.last_asked, UTC)) for key, tally, count in counted]
    with Store.open(url) as store:
        store.add_misses(records)
    for _, tally, count in counted:  # look-ups during the write stay counted
        tally.count -= count
    return len(records)


@atexit.register
def save_at_exit() -> None:
    """Saves misses to existing databases at exit, if the user wants it. Errors must not fail a program that ends well."""
    if os.environ.get(MISSES_VARIABLE) != "1":
        return
    for url in _tallies:
        try:
            with Store.open(url, create=False) as store:
                exists = store.exists
            if exists:
                _save(url)
        except Exception as error:
            print(f"autotax: misses are not saved: {' '.join(printable(str(error)).split())}", file=sys.stderr)
