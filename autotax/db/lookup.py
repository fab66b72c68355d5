"""ANSWERING: the config to run for a problem here, and why. A dict once asked; the database is read once.

Who answers is told in `autotax.db.policy`.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from pathlib import Path
from time import time

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.db import shipped
from autotax.db.answer import Answer
from autotax.db.index import Index
from autotax.db.misses import Tally, save_misses, tally
from autotax.db.policy import Source, answer, is_tuned
from autotax.db.size_buckets import representative
from autotax.db.staleness import Place
from autotax.db.store import Store
from autotax.db.url import resolve_url, shown
from autotax.hardware import Hardware, detect, environment

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
    """The config to run for `problem` on `hardware` (default: this machine), from the database `db` (default: yours), for
    calls made under `conditions` (default: what is usual on that hardware).

    Never raises for want of a winner or of a database; a broken database is a UsageError. With `allow_stale` a winner of
    this problem that was measured elsewhere or with other software answers before bulk-synchronous does. Answers are kept
    until `reload`: neither later winners nor a later $AUTOTAX_DB change them.

    `prove`: if the winner of this problem is stale only in software, first have it proven again by ranks of their own, for at
    most so many seconds (True: 60). Only for programs that do not use the GPUs yet; modules have a `prove` of their own.
    """
    if prove is not False:
        _prove(problem, hardware or detect(), conditions, db, prove)
    found = _kept.get((problem, hardware, db, conditions, allow_stale))
    if found is None:
        found = _ask((problem, hardware, db, conditions, allow_stale))
    config, miss = found
    if miss is not None:
        miss.count += 1
        miss.last_asked = time()
    return config


def peek(
    problem: Problem,
    *,
    hardware: Hardware | None = None,
    db: str | Path | None = None,
    conditions: Conditions | None = None,
) -> Answer:
    """What `lookup` would answer, without counting a miss: for what nobody is about to run."""
    return (_kept.get(asked := (problem, hardware, db, conditions, False)) or _ask(asked))[0]


def reload() -> None:
    """Forgets all answers and winners; the next look-up reads the database again. Misses stay counted."""
    _kept.clear()
    _yours.cache_clear()
    _shipped.cache_clear()


def sources(db: str | Path | None) -> tuple[Source, Source]:
    """The winners that answer: those of a database, then the shipped ones."""
    return _yours(resolve_url(db)), _shipped()


def _prove(
    problem: Problem, hardware: Hardware, conditions: Conditions | None, db: str | Path | None, wanted: bool | float
) -> None:
    from autotax.db import reproof

    if (seconds := reproof.seconds_of(wanted)) and reproof.stale([problem], hardware, conditions, db):
        if note := reproof.prove([problem], hardware, conditions, db, seconds):
            warnings.warn(note, RuntimeWarning, stacklevel=3)
        reload()


def _ask(asked: _Asked) -> tuple[Answer, Tally | None]:
    problem, hardware, db, conditions, allow_stale = asked
    hardware = hardware or detect()
    here = Place(hardware, environment(hardware.backend), conditions or Conditions.usual(hardware.on_gpu))
    known = sources(db)
    config = answer(problem, here, known, allow_stale=allow_stale)
    tuned = is_tuned(problem, here, known)
    miss = None if tuned else tally(resolve_url(db), representative(problem), hardware, here.conditions)
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[asked] = config, miss
    return config, miss


@lru_cache(maxsize=64)
def _yours(url: str) -> Source:
    with Store.open(url, create=False) as store:
        winners = Index(store.known_winners())
        if not store.exists:
            return Source(winners, empty=f"there is no database {shown(url)}")
    return Source(winners, empty="" if len(winners) else f"database {shown(url)} holds no winners")


@cache
def _shipped() -> Source:
    winners = Index(shipped.known_winners())
    return Source(winners, origin="shipped with autotax; ", whose="the shipped", empty=shipped.unreadable())
