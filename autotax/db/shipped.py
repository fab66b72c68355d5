"""Sources of winners: the user's database, then the files shipped with the package in the format of `autotax export`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db.formats import read, shipped_winners
from autotax.db.index import Index, IndexedWinner
from autotax.db.records import Place, WinnerRecord, merge
from autotax.db.store import Store
from autotax.db.url import resolve_url, shown

FOLDER = Path(__file__).parents[1] / "shipped"

T = TypeVar("T")


def known_winners() -> list[IndexedWinner]:
    """The best proven winner of each problem, place and digest of kernel sources."""
    return list(_shipped(FOLDER).index)


def winners_of(problem: Problem, here: Place) -> list[Config]:
    """The shipped winners of exactly this problem that a look-up in this place may answer with."""
    records = _shipped(FOLDER).index.of_problem(problem.key)
    return [winner.config for winner in records if winner.holds(here)]


def winners() -> list[WinnerRecord]:
    """The shipped winners with all their fields."""
    return [entry.winner for entry in merge(_files(FOLDER, read)[0]).values()]


def _files(folder: Path, read: Callable[[Path], list[T]]) -> tuple[list[T], str]:
    """The content of every valid file of a folder, and the first error in one line; it is empty if all files are valid."""
    content: list[T] = []
    wrong = ""
    for path in sorted(folder.glob("*.json")):
        try:
            content += read(path)
        except UsageError as error:
            wrong = wrong or f"shipped winners are not complete: {error}"
    return content, wrong


def _strongest(winners: Iterable[IndexedWinner]) -> list[IndexedWinner]:
    """Leaves out winners that another file has with a higher lower bound of the speed-up."""
    weakest_first = sorted(winners, key=lambda winner: (winner.interval_low, winner.config_json))
    return list({(winner.problem_key, winner.place, winner.kernel_digest): winner for winner in weakest_first}.values())


@dataclass(frozen=True)
class Source:
    """Winners and their origin, and the reason to give if there are no winners at all."""

    index: Index
    origin: str = ""
    """A prefix for the reason of an answer."""
    whose: str = "the"
    """The article in texts like `the winner of this problem`."""
    empty: str = ""


def sources(db: str | Path | None) -> tuple[Source, Source]:
    """The sources of look-ups: the winners of a database, then the shipped winners."""
    return _database(resolve_url(db)), _shipped(FOLDER)


def forget_sources() -> None:
    """The next look-up reads the database and the shipped files again."""
    _database.cache_clear()
    _shipped.cache_clear()


@lru_cache(maxsize=64)
def _database(url: str) -> Source:
    with Store.open(url, create=False) as store:
        if not store.exists:
            return Source(Index(()), empty=f"there is no database {shown(url)}")
        winners = Index(store.known_winners())
    return Source(winners, empty="" if len(winners) else f"database {shown(url)} holds no winners")


@cache
def _shipped(folder: Path) -> Source:
    winners, wrong = _files(folder, shipped_winners)
    return Source(Index(_strongest(winners)), origin="shipped with autotax; ", whose="the shipped", empty=wrong)


# Warm start: configs of former winners, which are tried before the seeds of the space.

MOST = 8
"""Most configs of a warm start."""
FAR = 2.0
"""Winners at a greater distance are not used. A distance counts the doublings of all sizes and of the ranks."""


Admit = Callable[[Config], Config | None]
"""The config of today's space that a former winner has become, or None."""


def precedents(problem: Problem, here: Place, winners: Iterable[IndexedWinner], admit: Admit) -> list[Config]:
    """Admitted configs of winners of this problem and of similar problems, on this backend. The nearest sizes come first, then
    winners from a place more similar to `here`.
    """
    near = [
        (far, len(winner.differences(here)), -winner.interval_low, winner.config_json)
        for winner in winners
        if winner.place.hardware.backend == here.hardware.backend
        and (far := distance(problem.key, winner.problem_key)) <= FAR
    ]
    configs = (Config.from_dict(json.loads(text)) for text in dict.fromkeys(text for *_, text in sorted(near)))
    return list(islice(dict.fromkeys(filter(None, map(admit, configs))), MOST))


def known_precedents(problem: Problem, here: Place, store: Store, admit: Admit) -> list[Config]:
    """The precedents among the winners of this database and the shipped winners."""
    return precedents(problem, here, [*store.known_winners(), *known_winners()], admit)


def distance(one: str, other: str) -> float:
    """Doublings between two problems, from their keys; infinite if they differ in more than sizes."""
    (words, sizes), (other_words, other_sizes) = _parts(one), _parts(other)
    if words != other_words or sizes.keys() != other_sizes.keys():
        return math.inf
    return sum(abs(math.log2(size / other_sizes[name])) for name, size in sizes.items())


@lru_cache(maxsize=2**14)
def _parts(key: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """The parts of a key like `op/m=512,dtype=bf16`: the parts that are no sizes, and the sizes by name."""
    op, _, fields = key.partition("/")
    pairs = [field.partition("=") for field in fields.split(",")]
    sizes = {name: int(value) for name, _, value in pairs if value.isdecimal() and int(value)}
    return (op, *(f"{name}={value}" for name, _, value in pairs if name not in sizes)), sizes
