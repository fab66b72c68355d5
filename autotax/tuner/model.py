"""PREDICT, THEN MEASURE: a prior over configs, a Gaussian process on what is measured here, and expected improvement.

The process is on the residual log(latency) - prior. Its kernel has a part that all configs share, one that a variant shares, and
one that falls off with the steps between two configs of a variant. All are wider for configs that the prior says are slow, for
there it errs more. Candidates are seeds, what won before, valid configs at random, and neighbours of what looks best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from random import Random

import numpy as np

from autotax.core.config import Config
from autotax.spaces import Space
from autotax.tuner.prior import Prior

RANDOM, ATTEMPTS = 300, 12
"""Valid configs of a variant that are drawn as candidates, and points tried for each."""
WALKS, WALKERS = 4, 16
"""Rounds in which the neighbours of the most promising candidates become candidates, and of how many."""
BEST = 3
"""Measured configs whose neighbours become candidates."""
AHEAD, DRAWS = 8, 256
"""Trials that `gain` looks ahead, and joint draws of their outcomes."""
LOOK_BACK = 16
"""Trials by which `gain` judges what it expects."""
SHARED, OF_VARIANT, OWN, WIDER, REACH = 0.35, 0.24, 0.48, 0.38, 4.5
"""Of the prior's error: standard deviations of the kernel's three parts. By how much they widen with the predicted distance from
the best, over the error; and the steps after which two configs tell little of each other."""
NOISE = 0.1, 0.004, 0.014
"""Standard deviation of a measured logarithm: this share of the prior's error, at least and at most."""
DOUBTED = 4
"""Predictions that count as right before those of this run tell how far off predictions are."""


class Model:
    """What is believed of the candidates of one space, in log microseconds."""

    def __init__(self, space: Space, prior: Prior, seed: int, start: Iterable[Config]) -> None:
        self.space, self.prior, error = space, prior, prior.error
        self._parts = SHARED * error, OF_VARIANT * error, OWN * error
        self._wider = 0.0 if prior.flat else WIDER / error
        self._noise = min(NOISE[2], max(NOISE[1], NOISE[0] * error))
        self.configs: list[Config] = []
        self._at: dict[Config, int] = {}
        self._places = _Places(space)
        self._m = np.zeros(0)
        self._variants = np.zeros(0, int)
        self._coords = np.zeros((0, self._places.count))
        self._observed: list[int] = []
        self._y: list[float] = []
        self._cholesky = np.zeros((0, 0))
        self._b = np.zeros((0, 0))
        self._r = np.zeros(0)
        self._best_prior = 0.0
        self._surprises: list[float] = []
        self._expected: list[float] = []
        self._won: list[float] = []
        self._open(seed, list(start))

    def _open(self, seed: int, start: list[Config]) -> None:
        self._add(start)
        random = Random(seed)
        for variant in self.space.variants.values():
            points = (variant.point(random) for _ in range(RANDOM * ATTEMPTS))
            self._add(list(islice((config for config in points if variant.why_not(config) is None), RANDOM)))
        for _ in range(0 if self.prior.flat else WALKS):
            self._add_neighbours(np.argsort(self._m, kind="stable")[:WALKERS])
        self._best_prior = float(np.sort(self._m)[:3].mean())
        self._mean, self._variance = self._m.copy(), self._own_variance(np.arange(len(self._m)))

    # What is learnt

    def tell(self, config: Config, us: float) -> None:
        """Learns a verified latency, in microseconds."""
        self._add([config])
        at, y = self._at[config], math.log(us)
        if self._observed:
            surprise = (y - self._mean[at]) ** 2 / (self._variance[at] + self._noise**2)
            self._surprises.append(min(float(surprise), 9.0))
            best = self._best
            self._expected.append(float(self._improvement(self._variance)[at]))
            self._observe(at, y)
            self._won.append(max(best - float(self._mean[at]), 0.0))
        else:
            self._observe(at, y)
        order = np.array(self._observed)[np.argsort(self._mean[self._observed], kind="stable")]
        self._add_neighbours(order[:BEST])

    def _observe(self, at: int, y: float) -> None:
        """One more row of the Cholesky factor; all beliefs follow it."""
        noise = self._noise * (1 + 2 * min(max(y - min([*self._y, y]), 0.0), 1.0))
        column, b = self._kernel(np.array([at]))[:, 0], self._b[:, at]
        d = math.sqrt(max(column[at] + noise**2 - b @ b, 1e-12))
        count = len(b)
        grown = np.zeros((count + 1, count + 1))
        grown[:count, :count], grown[count, :count], grown[count, count] = self._cholesky, b, d
        self._cholesky = grown
        row = (column - self._b.T @ b) / d
        residual = (y - self._m[at] - b @ self._r) / d
        self._b, self._r = np.vstack([self._b, row]), np.append(self._r, residual)
        self._mean = self._mean + row * residual
        self._variance = np.maximum(self._variance - row**2, 1e-10)
        self._observed.append(at)
        self._y.append(y)

    # What is asked

    def suggest(self, usable: Sequence[bool] | np.ndarray, pending: Iterable[Config]) -> Config | None:
        """The usable candidate of the greatest expected improvement, if those that are pending come out as expected; None
        where none is usable. `usable` is told for each of `configs`.
        """
        return next(self.foreseen(usable, pending), None)

    def foreseen(self, usable: Sequence[bool] | np.ndarray, pending: Iterable[Config]) -> Iterator[Config]:
        """What `suggest` would give, again and again, if all came out as expected."""
        at = [self._at[config] for config in pending if config in self._at]
        return (self.configs[chosen] for chosen in self._promising(usable, at))

    def gain(self, usable: Sequence[bool] | np.ndarray) -> float:
        """What the next AHEAD trials are expected to win, as a share of the best latency: the mean over joint draws of those
        with the greatest expected improvement, each chosen as if the ones before had come out as expected. If the last trials
        won less than was expected of them, so much less is expected of the next.
        """
        if not self._observed:
            return math.inf
        chosen = list(islice(self._promising(usable), AHEAD))
        if not chosen:
            return 0.0
        rows = np.array(chosen)
        covariance = self._kernel(rows)[rows] - self._b[:, rows].T @ self._b[:, rows]
        factor = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(rows)))
        draws = self._mean[rows] + self._scale * np.random.default_rng(0).normal(size=(DRAWS, len(rows))) @ factor.T
        return self._tempered(float(np.maximum(self._best - draws.min(1), 0.0).mean()))

    def _tempered(self, gain: float) -> float:
        """An expectation, times what the last trials won over what was expected of them, at most 1. It counts as met once
        besides, so that a few trials without luck are no reason to give up.
        """
        expected, won = (gain + sum(each[-LOOK_BACK:]) for each in (self._expected, self._won))
        return gain * min(1.0, won / expected) if expected else gain

    def predicted(self, config: Config) -> float:
        """Log microseconds over that of the best, as believed."""
        self._add([config])
        return float(self._mean[self._at[config]] - self._best)

    @property
    def _best(self) -> float:
        """The mean of the best that is measured, not its figure: that one was lucky."""
        return float(self._mean[self._observed].min()) if self._observed else float(self._mean.min())

    @property
    def _scale(self) -> float:
        """How far off predictions have been here, of what was expected."""
        return math.sqrt((DOUBTED + sum(self._surprises)) / (DOUBTED + len(self._surprises)))

    def _improvement(self, variance: np.ndarray) -> np.ndarray:
        """Expected improvement of each candidate, in log microseconds."""
        deviation = np.sqrt(variance) * self._scale
        z = (self._best - self._mean) / deviation
        return deviation * (z * _normal_cdf(z) + np.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    def _promising(self, usable: Sequence[bool] | np.ndarray, pending: Iterable[int] = ()) -> Iterator[int]:
        """Usable candidates, each of the greatest expected improvement if those before it came out as expected."""
        free, variance, b = np.array(usable, bool), self._variance, self._b
        for at in pending:
            variance, b = self._believed(at, variance, b)
        while free.any():
            at = int(np.argmax(np.where(free, self._improvement(variance), -1.0)))
            yield at
            free[at] = False
            variance, b = self._believed(at, variance, b)

    def _believed(self, at: int, variance: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Variances if one more were measured."""
        column = self._kernel(np.array([at]))[:, 0]
        d = math.sqrt(max(column[at] + self._noise**2 - b[:, at] @ b[:, at], 1e-12))
        row = (column - b.T @ b[:, at]) / d
        return np.maximum(variance - row**2, 1e-10), np.vstack([b, row])

    # Candidates

    def _add_neighbours(self, of: Iterable[int]) -> None:
        near = (neighbour for at in list(of) for neighbour in self.space.neighbours(self.configs[int(at)]))
        self._add([config for config in near if config not in self._at])

    def _add(self, configs: Sequence[Config]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in self._at]
        if not new:
            return
        first = len(self.configs)
        self._at |= {config: first + i for i, config in enumerate(new)}
        self.configs += new
        self._m = np.append(self._m, self.prior(new))
        self._variants = np.append(self._variants, [self._places.variants[config.variant] for config in new])
        self._coords = np.vstack([self._coords, [self._places.of(config) for config in new]])
        if first and hasattr(self, "_mean"):  # what was measured tells of the new ones as of the old
            rows = np.arange(first, len(self.configs))
            cross = self._between(rows, np.array(self._observed, int))
            b = np.linalg.solve(self._cholesky, cross.T) if self._observed else np.zeros((0, len(rows)))
            self._b = np.hstack([self._b, b])
            self._mean = np.append(self._mean, self._m[rows] + b.T @ self._r)
            self._variance = np.append(self._variance, np.maximum(self._own_variance(rows) - (b**2).sum(0), 1e-10))
        else:
            self._b = np.zeros((0, len(self.configs)))

    # The kernel

    def _kernel(self, columns: np.ndarray) -> np.ndarray:
        return self._between(np.arange(len(self.configs)), columns)

    def _between(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        shared, of_variant, own = self._parts
        found = np.full((len(rows), len(columns)), shared**2)
        wide_rows, wide_columns = self._widened(rows), self._widened(columns)
        for place, at in enumerate(columns):
            same = self._variants[rows] == self._variants[at]
            steps = np.abs(self._coords[rows[same]] - self._coords[at]).sum(1)
            part = of_variant**2 + own**2 * np.exp(-steps / REACH)
            found[same, place] += wide_rows[same] * wide_columns[place] * part
        return found

    def _own_variance(self, rows: np.ndarray) -> np.ndarray:
        shared, of_variant, own = self._parts
        return shared**2 + self._widened(rows) ** 2 * (of_variant**2 + own**2)

    def _widened(self, rows: np.ndarray) -> np.ndarray:
        return 1 + self._wider * np.clip(self._m[rows] - self._best_prior, 0.0, 1.5)


class _Places:
    """Coordinates of configs: a number's place among the choices of its parameter, and for a word half a step to each choice."""

    def __init__(self, space: Space) -> None:
        self.variants = {variant: number for number, variant in enumerate(space.variants)}
        self._spaces = space.variants
        self._widths = {
            name: [len(choices) if isinstance(choices[0], str) else 1 for choices in variant.parameters.values()]
            for name, variant in space.variants.items()
        }
        self.count = max((sum(widths) for widths in self._widths.values()), default=0)

    def of(self, config: Config) -> list[float]:
        found: list[float] = []
        variant = self._spaces.get(config.variant)
        for name, choices in variant.parameters.items() if variant else ():
            at = choices.index(config[name])
            found += [0.5 * (at == i) for i in range(len(choices))] if isinstance(choices[0], str) else [float(at)]
        return found + [0.0] * (self.count - len(found))


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    """Of the normal distribution, to 1e-7 (Abramowitz and Stegun, 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = tail * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return np.where(z >= 0, 1 - upper, upper)
