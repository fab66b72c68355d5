"""Buckets: the sizes that vary from call to call, a few steps for each doubling.

A bucket ends at a power of two or at three quarters of one: 1, 2, 3, 4, 6, 8, 12, 16, 24 ... The end represents the bucket: a
config tuned for the end fits smaller sizes with a little padding. The smallest size of a bucket is at least two thirds of its
end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from autotax.core.config import Config
from autotax.core.problem import Problem, power_of_two
from autotax.db.records import Place, differences, holds
from autotax.operators import registry


@lru_cache(maxsize=256)
def _sizes_of(op: str) -> re.Pattern[str] | None:
    """A pattern for the varying sizes of an operator in a key; None for an operator that is not here."""
    if not registry.known(op):
        return None
    names = registry.named(op).problem.varying()
    return re.compile(rf"(?<=[/,])(?:{'|'.join(names)})=\d+") if names else None


def bucket(size: int) -> tuple[int, int]:
    """The least and the greatest size of the bucket that `size` (at least 1) is in."""
    whole = power_of_two(size)
    middle = whole * 3 // 4
    return (whole // 2 + 1, middle) if size <= middle else (middle + 1, whole)


def buckets_up_to(size: int) -> list[int]:
    """The ends of all buckets from that of size 1 to that of `size`."""
    ends = [1]
    while ends[-1] < size:
        ends.append(bucket(ends[-1] + 1)[1])
    return ends


def representative(problem: Problem) -> Problem:
    """The problem whose tuning serves its whole bucket: each varying size is the greatest allowed size of its bucket."""
    largest = problem.varying().items()
    sizes: dict[str, Any] = {name: min(bucket(getattr(problem, name))[1], most) for name, most in largest}
    return replace(problem, **sizes)


def bucket_key(key: str) -> str:
    """The key of a problem's bucket. Two problems have the same one exactly if the tuning of one may serve the other."""
    sizes = _sizes_of(key.partition("/")[0])
    return sizes.sub(lambda match: _end(match[0]), key) if sizes else key


def family_key(key: str) -> str:
    """The key of a problem without its varying sizes."""
    sizes = _sizes_of(key.partition("/")[0])
    return sizes.sub("", key) if sizes else key


@lru_cache(maxsize=2**16)
def _end(size: str) -> str:
    name, _, value = size.partition("=")
    return f"{name}<={bucket(int(value))[1]}"


def spelled(problem: Problem) -> str:
    """`m 385 to 512`"""
    ranges = {name: bucket(getattr(problem, name)) for name in problem.varying()}
    return ", ".join(f"{name} {first} to {last}" if first < last else f"{name} {last}" for name, (first, last) in ranges.items())


# Finding a winner among thousands: by problem, and by bucket. Light enough to be built while a server starts.

class IndexedWinner(NamedTuple):
    """The fields of a winner that a look-up reads."""

    problem_key: str
    place: Place
    kernel_digest: str
    """Digest of the sources of its variant."""
    config_json: str
    """Decoded only when the winner answers a look-up, because few of thousands ever do."""
    speedup: float
    interval_low: float
    interval_high: float
    tie: bool
    trial_id: int
    """Later trials have greater ids; 0 for shipped winners."""
    latency_us: float = math.nan
    """NaN where it is not known."""
    defect: str = ""
    """Why the row in the database is malformed, if it is. Then the winner holds nowhere."""

    @property
    def config(self) -> Config:
        return Config.from_dict(json.loads(self.config_json))

    @property
    def op(self) -> str:
        return self.problem_key.partition("/")[0]

    def holds(self, here: Place) -> bool:
        """Whether a look-up in this place may answer with the winner."""
        return not self.defect and holds(self, self.place, here)

    def differences(self, here: Place) -> list[str]:
        """The reasons why this winner does not hold here; empty if it does. See `autotax.db.records.differences`."""
        return [f"its row in the database is malformed ({self.defect})"] if self.defect else differences(self, self.place, here)


class Index:
    """Winners of one source, stale ones too."""

    def __init__(self, winners: Iterable[IndexedWinner]) -> None:
        self._by_problem: dict[str, list[IndexedWinner]] = {}
        for winner in winners:
            self._by_problem.setdefault(winner.problem_key, []).append(winner)

    def __len__(self) -> int:
        return sum(map(len, self._by_problem.values()))

    def __iter__(self) -> Iterator[IndexedWinner]:
        for winners in self._by_problem.values():
            yield from winners

    def of_problem(self, key: str) -> list[IndexedWinner]:
        return self._by_problem.get(key, [])

    def of_bucket(self, key: str) -> list[IndexedWinner]:
        """The winners of all problems in the bucket of the problem with this key."""
        return self._by_bucket.get(bucket_key(key), [])

    def of_family(self, key: str) -> list[IndexedWinner]:
        """The winners of all problems that differ from the problem with this key in varying sizes alone."""
        return self._by_family.get(family_key(key), [])

    @cached_property
    def _by_bucket(self) -> dict[str, list[IndexedWinner]]:
        return self._grouped(bucket_key)

    @cached_property
    def _by_family(self) -> dict[str, list[IndexedWinner]]:
        return self._grouped(family_key)

    def _grouped(self, group_of: Callable[[str], str]) -> dict[str, list[IndexedWinner]]:
        """Winners by a group of their problems' keys, built at the first look-up of a problem without its own winner."""
        groups: dict[str, list[IndexedWinner]] = {}
        for key, winners in self._by_problem.items():
            groups.setdefault(group_of(key), []).extend(winners)
        return groups
