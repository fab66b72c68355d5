"""WHO WON BEFORE: configs worth a trial ahead of what arithmetic suggests.

After an upgrade, on other devices and for sizes that nobody has tuned, stored and shipped winners do not answer (db.policy).
They may still be the best there is or near it, and many are no seeds: they say where a search may begin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import shipped
from autotax.db.index import Known
from autotax.db.staleness import Place
from autotax.db.store import Store

MOST = 8
"""Configs."""
FAR = 2.0
"""Doublings, those of all sizes and of the ranks together, beyond which another problem says too little."""


def precedents(problem: Problem, here: Place, winners: Iterable[Known], fits: Callable[[Config], bool]) -> list[Config]:
    """Configs of winners of this problem and of those like it, on this backend, that fit: the nearest sizes first, and of
    equally near ones those that were measured in a place more like `here`.
    """
    near = [
        (far, len(winner.differences(here)), -winner.interval_low, winner.config_json)
        for winner in winners
        if winner.place.hardware.backend == here.hardware.backend
        and (far := distance(problem.key, winner.problem_key)) <= FAR
    ]
    configs = (Config.from_dict(json.loads(text)) for text in dict.fromkeys(text for *_, text in sorted(near)))
    return list(islice(filter(fits, configs), MOST))


def known_precedents(problem: Problem, here: Place, store: Store, fits: Callable[[Config], bool]) -> list[Config]:
    """The precedents among the winners of this database and those that are shipped."""
    return precedents(problem, here, [*store.known_winners(), *shipped.known_winners()], fits)


def distance(one: str, other: str) -> float:
    """Doublings between two problems, from their keys; infinite where more differs than sizes."""
    (words, sizes), (other_words, other_sizes) = _parts(one), _parts(other)
    if words != other_words or sizes.keys() != other_sizes.keys():
        return math.inf
    return sum(abs(math.log2(size / other_sizes[name])) for name, size in sizes.items())


@lru_cache(maxsize=2**14)
def _parts(key: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """`op/m=512,dtype=bf16`: what is no size, and the sizes by name."""
    op, _, fields = key.partition("/")
    named = [field.partition("=") for field in fields.split(",")]
    sizes = {name: int(value) for name, _, value in named if value.isdecimal() and int(value)}
    return (op, *(f"{name}={value}" for name, _, value in named if name not in sizes)), sizes
