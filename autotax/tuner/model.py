"""The model of the sampler `gp`: a prior over configs, a Gaussian process on the trials of this run, and expected improvement.

The process is on the residual log(latency) - prior. Its kernel has three parts. All configs share the first, the configs of a
variant share the second, and the third falls off with the steps between two configs of a variant. All parts are wider for configs
with a slow prior, because the prior errs more there. Candidates are seeds, former winners, random valid configs, and neighbours
of the most promising configs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.spaces import Space

Named = dict[str, float]


def log_base(problem: Problem) -> float:
    """The logarithm of the analytical time, in microseconds."""
    return math.log(registry.of(problem).traits_module().base_us(problem))


def named(problem: Problem, hardware: Hardware, config: Config) -> Named:
    """Features by name. Numbers are logarithms. A word gives 1 under `name=word`; missing names count as 0."""
    return _of("p", problem.to_dict()) | _of_config(problem, hardware, config)


def matrix(problem: Problem, hardware: Hardware, configs: Sequence[Config], names: Sequence[str]) -> np.ndarray:
    """Float32 [configs, names]. A feature that a config lacks is 0 for words and -1 for numbers."""
    of_problem = _of("p", problem.to_dict())
    shared = [of_problem.get(name, 0.0 if "=" in name else -1.0) for name in names]
    rows = np.tile(np.array(shared, np.float32), (len(configs), 1))
    places = {name: at for at, name in enumerate(names)}
    for row, config in zip(rows, configs, strict=True):
        for name, value in _of_config(problem, hardware, config).items():
            if name in places:
                row[places[name]] = value
    return rows


def _of_config(problem: Problem, hardware: Hardware, config: Config) -> Named:
    traits = registry.of(problem).traits_module().traits(problem, hardware, config)
    of_traits = {f"t.{name}": math.log2(value) if value > 0 else -10.0 for name, value in traits.items()}
    return {f"variant={config.variant}": 1.0} | _of("c", config.values) | of_traits


def _of(kind: str, values: dict[str, int | str]) -> Named:
    return {
        f"{kind}.{name}" if isinstance(value, int) else f"{kind}.{name}={value}":
        math.log2(value + 1) if isinstance(value, int) else 1.0
        for name, value in values.items()
    }  # fmt: skip


# The prior: the latency of a config as predicted by boosted trees, which were trained on recorded trials of other problems.

FOLDER = Path(__file__).parents[1] / "shipped"
FLAT_ERROR = 0.6
"""The error of a flat prior, in logarithms."""
ROWS = 512
"""Configs that are evaluated at once."""


@dataclass(frozen=True)
class Trees:
    """An additive ensemble. Node `i` of a tree goes on to `left[i]` where its feature is at most `threshold[i]`, else to
    `right[i]`; a leaf points to itself and has `value[i]`. All arrays are [trees, nodes].
    """

    names: tuple[str, ...]
    devices: tuple[str, ...]
    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    depth: int
    error: float
    """Root mean square error of log latencies on problems left out, among configs within 20 % of the best."""

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """The sum over the trees, float64 [rows]."""
        return np.concatenate([self._some(rows[at : at + ROWS]) for at in range(0, len(rows), ROWS)] or [np.zeros(0)])

    def _some(self, rows: np.ndarray) -> np.ndarray:
        count, nodes = self.value.shape
        first = np.arange(count)[None, :] * nodes  # index of each tree's root in the flattened arrays
        starts = np.arange(len(rows))[:, None] * rows.shape[1]
        at = np.tile(first, (len(rows), 1))
        for _ in range(self.depth):
            low = rows.take(starts + self.feature.take(at)) <= self.threshold.take(at)
            at = first + np.where(low, self.left.take(at), self.right.take(at))
        return self.value.take(at).sum(1, dtype=np.float64)

    def save(self, path: Path) -> None:
        """Writes the arrays, compressed."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in ("feature", "threshold", "left", "right", "value")}
        words: dict[str, Any] = {name: np.array(getattr(self, name)) for name in ("names", "devices", "depth", "error")}
        np.savez_compressed(path, allow_pickle=False, **arrays, **words)

    @classmethod
    def load(cls, path: Path) -> Trees:
        """Reads a file written by `save`."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("feature", "threshold", "left", "right", "value")}
            names, devices = (tuple(str(word) for word in file[name]) for name in ("names", "devices"))
            return cls(names, devices, **arrays, depth=int(file["depth"]), error=float(file["error"]))


class Prior:
    """The expected logarithm of the latency of configs of one problem; `flat` if nothing is known about them."""

    def __init__(self, problem: Problem, hardware: Hardware, trees: Trees | None) -> None:
        self._problem, self._hardware, self._trees = problem, hardware, trees
        self.flat = trees is None
        self.error = trees.error if trees else FLAT_ERROR

    def knows(self, variant: str) -> bool:
        """Whether the training data contained trials of this variant."""
        return self._trees is not None and f"variant={variant}" in self._trees.names

    def __call__(self, configs: Sequence[Config]) -> np.ndarray:
        """Log microseconds, float64 [configs]; zeros of a flat prior."""
        if self._trees is None:
            return np.zeros(len(configs))
        rows = matrix(self._problem, self._hardware, configs, self._trees.names)
        return self._trees.predict(rows) + log_base(self._problem)


def prior_for(problem: Problem, hardware: Hardware) -> Prior:
    """The shipped prior of an operator on devices that it was trained on; a flat one on others, for instance AMD GPUs."""
    trees = _shipped(problem.op) if registry.of(problem).traits else None
    return Prior(problem, hardware, trees if trees and hardware.device in trees.devices else None)


def usual_sampler(problem: Problem, hardware: Hardware) -> str:
    """The default sampler. In replays the model `gp` is better than `tpe` with a prior, and worse without (docs/search.md)."""
    return "tpe" if prior_for(problem, hardware).flat else "gp"


@functools.lru_cache(maxsize=8)
def _shipped(op: str) -> Trees | None:
    path = FOLDER / f"prior-{op}.npz"
    return Trees.load(path) if path.exists() else None


RANDOM, ATTEMPTS = 300, 12
"""Valid configs of a variant that are drawn as candidates, and points tried for each."""
WALKS, WALKERS = 4, 16
"""Rounds in which neighbours of the most promising candidates become candidates, and how many have neighbours each time."""
BEST = 3
"""Measured configs whose neighbours become candidates."""
AHEAD, DRAWS = 8, 256
"""Trials that `gain` looks ahead, and joint draws of their outcomes."""
LOOK_BACK = 16
"""Recent trials by which `gain` corrects its expectation."""
SHARED, OF_VARIANT, OWN, WIDER, REACH = 0.35, 0.24, 0.48, 0.38, 4.5
"""The first three are standard deviations of the kernel's three parts, as shares of the prior's error. WIDER is their growth with
the predicted distance from the best, divided by the error. After REACH steps two configs are hardly correlated.
"""
NOISE = 0.1, 0.004, 0.014
"""Standard deviation of a measured logarithm: share of the prior's error, lower bound, upper bound."""
DOUBTED = 4
"""Number of pseudo-predictions with the expected error, which steady the error estimate of the first real predictions."""


class Model:
    """Posterior of the candidates of one space, in log microseconds."""

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

    # Learning

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
        """Adds a row to the Cholesky factor and updates the posterior of all candidates."""
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

    # Questions

    def suggest(self, usable: Sequence[bool] | np.ndarray, pending: Iterable[Config]) -> Config | None:
        """The usable candidate with the greatest expected improvement, assuming that pending trials come out as predicted. None
        if no candidate is usable. `usable` has one entry for each of `configs`.
        """
        return next(self.foreseen(usable, pending), None)

    def foreseen(self, usable: Sequence[bool] | np.ndarray, pending: Iterable[Config]) -> Iterator[Config]:
        """The successive results of `suggest`, assuming that each trial comes out as predicted."""
        at = [self._at[config] for config in pending if config in self._at]
        return (self.configs[chosen] for chosen in self._promising(usable, at))

    def gain(self, usable: Sequence[bool] | np.ndarray) -> float:
        """The expected gain of the next AHEAD trials, as a share of the best latency. It is the mean over joint draws of the
        trials with the greatest expected improvement. Each is chosen as if the ones before had come out as predicted. If the last
        trials gained less than expected, the expectation is scaled down accordingly.
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
        return self.tempered(float(np.maximum(self._best - draws.min(1), 0.0).mean()))

    def tempered(self, gain: float) -> float:
        """Scales the expected gain by recent actual over expected gain, at most 1, with one pseudo-success."""
        expected, won = (gain + sum(history[-LOOK_BACK:]) for history in (self._expected, self._won))
        return gain * min(1.0, won / expected) if expected else gain

    def predicted(self, config: Config) -> float:
        """The predicted log latency of a config minus that of the best."""
        self._add([config])
        return float(self._mean[self._at[config]] - self._best)

    @property
    def _best(self) -> float:
        """The posterior mean of the best measured config. Its measured figure would be biased by luck."""
        return float(self._mean[self._observed].min()) if self._observed else float(self._mean.min())

    @property
    def _scale(self) -> float:
        """Actual error of the predictions in this run over their expected error."""
        return math.sqrt((DOUBTED + sum(self._surprises)) / (DOUBTED + len(self._surprises)))

    def _improvement(self, variance: np.ndarray) -> np.ndarray:
        """Expected improvement of each candidate, in log microseconds."""
        deviation = np.sqrt(variance) * self._scale
        z = (self._best - self._mean) / deviation
        return deviation * (z * _normal_cdf(z) + np.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    def _promising(self, usable: Sequence[bool] | np.ndarray, pending: Iterable[int] = ()) -> Iterator[int]:
        """Usable candidates, each with the greatest expected improvement if the ones before come out as predicted."""
        free, variance, b = np.array(usable, bool), self._variance, self._b
        for at in pending:
            variance, b = self._believed(at, variance, b)
        while free.any():
            at = int(np.argmax(np.where(free, self._improvement(variance), -1.0)))
            yield at
            free[at] = False
            variance, b = self._believed(at, variance, b)

    def _believed(self, at: int, variance: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Variances after one more measurement."""
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
        if first and hasattr(self, "_mean"):  # the measurements update the new candidates too
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
        covariance = np.full((len(rows), len(columns)), shared**2)
        wide_rows, wide_columns = self._widened(rows), self._widened(columns)
        for place, at in enumerate(columns):
            same = self._variants[rows] == self._variants[at]
            steps = np.abs(self._coords[rows[same]] - self._coords[at]).sum(1)
            part = of_variant**2 + own**2 * np.exp(-steps / REACH)
            covariance[same, place] += wide_rows[same] * wide_columns[place] * part
        return covariance

    def _own_variance(self, rows: np.ndarray) -> np.ndarray:
        shared, of_variant, own = self._parts
        return shared**2 + self._widened(rows) ** 2 * (of_variant**2 + own**2)

    def _widened(self, rows: np.ndarray) -> np.ndarray:
        return 1 + self._wider * np.clip(self._m[rows] - self._best_prior, 0.0, 1.5)


class _Places:
    """Coordinates of configs: a number has its index among the choices, and words are half a step apart from each other."""

    def __init__(self, space: Space) -> None:
        self.variants = {variant: number for number, variant in enumerate(space.variants)}
        self._spaces = space.variants
        self._widths = {
            name: [len(choices) if isinstance(choices[0], str) else 1 for choices in variant.parameters.values()]
            for name, variant in space.variants.items()
        }
        self.count = max((sum(widths) for widths in self._widths.values()), default=0)

    def of(self, config: Config) -> list[float]:
        place: list[float] = []
        variant = self._spaces.get(config.variant)
        for name, choices in variant.parameters.items() if variant else ():
            at = choices.index(config[name])
            place += [0.5 * (at == i) for i in range(len(choices))] if isinstance(choices[0], str) else [float(at)]
        return place + [0.0] * (self.count - len(place))


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    """The cumulative normal distribution, to 1e-7 (Abramowitz and Stegun, 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = tail * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return np.where(z >= 0, 1 - upper, upper)
