"""A runner over a made-up landscape: every config has a latency or a failure status, and the runner counts requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.runner import Candidate, Effort, Measurement, Overlap

Landscape = Callable[[Config], float | str]
"""Microseconds of a config, or the status with which it fails."""


class Clock:
    """Stands in for the module `time`: only those who sleep let time pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SyntheticRunner:
    def __init__(self, landscape: Landscape, noise: float = 0.01) -> None:
        self.landscape = landscape
        self.noise = noise
        self.asked: Counter[str] = Counter()
        self.searched: list[Config] = []
        self.interrupt_after: int | None = None
        self.look_ahead = 1
        self.requests: list[tuple[list[Config], list[Config]]] = []
        self.random = random.Random(3)

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        if len(candidates) == 1 and effort.samples == Effort().samples:
            if self.interrupt_after is not None and len(self.searched) >= self.interrupt_after:
                raise KeyboardInterrupt
            self.searched.append(candidates[0].config)
        if overlap:
            overlap()
        self.asked.update(candidate.config.digest for candidate in candidates)
        common = [self.random.gauss(1, self.noise) for _ in range(effort.samples)]
        return [self.one(candidate, common) for candidate in candidates]

    def one(self, candidate: Candidate, common: list[float]) -> Measurement:
        outcome = self.landscape(candidate.config)
        if isinstance(outcome, str):
            return Measurement(candidate, outcome, f"made to be {outcome}")
        ranks = tuple(tuple(outcome * c * self.random.gauss(1, self.noise / 4) for c in common) for _ in range(2))
        return Measurement(candidate, "ok", None, ranks, 0.1, 1e-6, candidate.conditions.to_dict())

    @property
    def foresight(self) -> int:
        return self.look_ahead

    def expect(self, problem: Problem, configs: Sequence[Config], later: Iterable[Config] = ()) -> int:
        assert len(configs) <= self.look_ahead
        self.requests.append((list(configs), list(later)))
        return self.random.randrange(len(configs)) if configs else 0

    def close(self) -> None:
        pass
