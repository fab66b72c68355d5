"""ANSWERING: the config to run for a problem here, and why. A dict once loaded; the database is read once.

Only what was measured on the same hardware with the same kernels and the same comm library, under the conditions asked for,
answers. In order:

- exact: the winner of this very problem;
- nearest: the winner of the problem that differs in one size alone, by at most a factor of two, if the space admits it;
- fallback: bulk-synchronous, which is always right and never a surprise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db.records import WinnerRecord
from autotax.db.store import Store
from autotax.db.url import resolve_url, shown
from autotax.hardware import Environment, Hardware, detect, environment
from autotax.problem import Problem

VARYING = {"all-gather-gemm": ("m",), "flash-decode": ("batch", "kv_len")}
"""The sizes that a model changes from call to call; the others are its architecture."""

FARTHEST = 2.0
_CACHED = 2**16


@dataclass(frozen=True, eq=False)
class Answer(Config):
    """A config, and how it was come by. It equals, hashes and serialises as the Config that it is."""

    match: str = "fallback"
    """exact, nearest or fallback."""
    from_problem: str | None = None
    """Key of the problem whose winner this is; None for a fallback."""
    reason: str = ""
    """One line."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return (self.variant, self.params) == (other.variant, other.params)

    __hash__ = Config.__hash__


@dataclass(frozen=True)
class _Here:
    """Where a config is to run, and how it is called."""

    hardware: Hardware
    software: Environment
    conditions: Conditions

    def differences(self, winner: WinnerRecord) -> list[str]:
        """In what a winner was measured otherwise; empty if it holds here."""
        parts = []
        if winner.hardware.digest != self.hardware.digest:
            parts.append(f"on other hardware ({winner.hardware}; here {self.hardware})")
        if winner.kernel_digest != self.software.kernels:
            parts.append(f"with other kernel sources ({winner.kernel_digest}; here {self.software.kernels})")
        if winner.comm != self.software.comm:
            parts.append(f"with another comm library ({winner.comm}; here {self.software.comm})")
        if winner.conditions.key != self.conditions.key:
            parts.append(f"under other conditions ({winner.conditions.key}; here {self.conditions.key})")
        return parts


def lookup(
    problem: Problem,
    *,
    hardware: Hardware | None = None,
    db: str | Path | None = None,
    conditions: Conditions | None = None,
) -> Answer:
    """The config to run for `problem` on `hardware` (default: this machine), from the database `db` (default: yours), for
    calls made under `conditions` (default: what is usual on that hardware).

    Never raises for want of a winner or of a database; a broken database is a UsageError. Answers are kept until
    `reload`: neither later winners nor a later $AUTOTAX_DB change them.
    """
    return _answer(problem, hardware, db, conditions)


def reload() -> None:
    """Forgets all answers and winners; the next look-up reads the database again."""
    _answer.cache_clear()
    _winners.cache_clear()


@lru_cache(maxsize=_CACHED)
def _answer(
    problem: Problem, hardware: Hardware | None, db: str | Path | None, conditions: Conditions | None
) -> Answer:
    hardware = hardware or detect()
    here = _Here(hardware, environment(hardware.backend), conditions or Conditions.usual(hardware.on_gpu))
    url = resolve_url(db)
    winners = _winners(url)
    if winners is None:
        return _fallback(problem, hardware, f"there is no database {shown(url)}; run `autotax tune`")
    if not winners:
        return _fallback(problem, hardware, f"database {shown(url)} holds no winners; run `autotax tune`")
    current = [winner for winner in winners if not here.differences(winner)]
    exact = next((winner for winner in current if winner.problem == problem), None)
    return _exact(exact) if exact else _nearest_or_fallback(problem, here, current, winners)


@lru_cache(maxsize=64)
def _winners(url: str) -> tuple[WinnerRecord, ...] | None:
    """All winners of a database, None if there is no database."""
    with Store.open(url, create=False) as store:
        return tuple(store.winners(with_samples=False)) if store.exists else None


def _exact(winner: WinnerRecord) -> Answer:
    margin = (
        "ties with others of its round"
        if winner.tie
        else f"is {winner.speedup:.2f}x [{winner.interval_low:.2f}, {winner.interval_high:.2f}] of bulk-synchronous"
    )
    return _tuned(winner, "exact", f"tuned for this problem; {margin}")


def _nearest_or_fallback(
    problem: Problem, here: _Here, current: list[WinnerRecord], winners: tuple[WinnerRecord, ...]
) -> Answer:
    from autotax.spaces import space_for

    space = space_for(problem, here.hardware)
    refused = None
    for winner, size in _neighbours(problem, current):
        wanted, there = getattr(problem, size), getattr(winner.problem, size)
        why_not = space.why_not(winner.config)
        if why_not is None:
            return _tuned(winner, "nearest", f"tuned for {size}={there}, the nearest to {size}={wanted}")
        refused = refused or f"the nearest winner, of {size}={there}, does not fit {size}={wanted}: {why_not}"
    reason = (
        _stale(problem, here, winners)
        or refused
        or "no winner of this problem, nor one whose size is within a factor of two; run `autotax tune`"
    )
    return _fallback(problem, here.hardware, reason)


def _neighbours(problem: Problem, winners: list[WinnerRecord]) -> list[tuple[WinnerRecord, str]]:
    """Winners of problems that differ in one varying size, the nearest first, each with the name of that size."""
    found = []
    for winner in winners:
        size = _only_difference(problem, winner.problem)
        if size in VARYING.get(problem.op, ()):
            here, there = getattr(problem, size), getattr(winner.problem, size)
            distance = abs(math.log(there / here))
            # At equal distance the larger problem, and then the name: every rank must find the same neighbour.
            found.append((distance, -there, size, winner))
    near = [entry for entry in found if entry[0] <= math.log(FARTHEST) + 1e-9]
    return [(winner, size) for _, _, size, winner in sorted(near, key=lambda entry: entry[:3])]


def _only_difference(one: Problem, other: Problem) -> str:
    """The name of the one field in which two problems of one operator differ, empty if it is not one."""
    if type(one) is not type(other):
        return ""
    names = [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]
    return names[0] if len(names) == 1 else ""


def _stale(problem: Problem, here: _Here, winners: tuple[WinnerRecord, ...]) -> str | None:
    """Why the winner of this very problem does not answer; of several the one with the fewest differences."""
    skipped = [here.differences(winner) for winner in winners if winner.problem == problem]
    if not skipped:
        return None
    fewest = sorted(skipped, key=len)[0]
    return f"the winner of this problem was measured {' and '.join(fewest)}; run `autotax tune` again"


def _tuned(winner: WinnerRecord, match: str, reason: str) -> Answer:
    return Answer(winner.config.variant, winner.config.params, match, winner.problem.key, reason)


def _fallback(problem: Problem, hardware: Hardware, reason: str) -> Answer:
    from autotax.spaces import space_for

    config = space_for(problem, hardware).default("bsp")
    return Answer(config.variant, config.params, "fallback", None, reason)
