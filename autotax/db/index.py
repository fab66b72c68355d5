"""FINDING a winner among thousands: by problem, and by bucket. Light enough to be built while a server starts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from autotax.core.config import Config
from autotax.db.size_buckets import bucket_key
from autotax.db.staleness import Place
from autotax.digests import variant_digest


class Known(NamedTuple):
    """What a look-up needs of a winner."""

    problem_key: str
    place: Place
    kernels: str
    """Digest of the sources of its variant."""
    config_json: str
    """Read when it answers, for few of thousands ever do."""
    speedup: float
    interval_low: float
    interval_high: float
    tie: bool
    trial_id: int
    """The greater, the later; 0 of what is shipped."""

    @property
    def config(self) -> Config:
        return Config.from_dict(json.loads(self.config_json))

    def differences(self, here: Place) -> list[str]:
        """What differs here from where it was measured, field by field; empty if it holds here."""
        op, variant = self.problem_key.partition("/")[0], json.loads(self.config_json)["variant"]
        return self.place.differences(here, (self.kernels, variant_digest(op, variant)))


class Index:
    """Winners of one source, stale ones too."""

    def __init__(self, winners: Iterable[Known]) -> None:
        self._by_problem: dict[str, list[Known]] = {}
        for winner in winners:
            self._by_problem.setdefault(winner.problem_key, []).append(winner)

    def __len__(self) -> int:
        return sum(map(len, self._by_problem.values()))

    def of_problem(self, key: str) -> list[Known]:
        return self._by_problem.get(key, [])

    def of_bucket(self, key: str) -> list[Known]:
        """The winners of all problems in the bucket of the problem with this key."""
        return self._by_bucket.get(bucket_key(key), [])

    @cached_property
    def _by_bucket(self) -> dict[str, list[Known]]:
        """Made for the first problem that has no winner of its own."""
        buckets: dict[str, list[Known]] = {}
        for key, winners in self._by_problem.items():
            buckets.setdefault(bucket_key(key), []).extend(winners)
        return buckets
