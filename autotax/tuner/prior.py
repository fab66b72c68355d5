"""Features of (problem, config) for models of latencies: sizes, parameters, and quantities derived from them (`traits`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators import registry

Named = dict[str, float]


def has_traits(problem: Problem) -> bool:
    """Whether the operator declares traits, from which a model can learn."""
    return registry.of(problem).traits is not None


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
    trees = _shipped(problem.op) if has_traits(problem) else None
    return Prior(problem, hardware, trees if trees and hardware.device in trees.devices else None)


def usual_sampler(problem: Problem, hardware: Hardware) -> str:
    """The default sampler. In replays the model `gp` is better than `tpe` with a prior, and worse without (docs/search.md)."""
    return "tpe" if prior_for(problem, hardware).flat else "gp"


@functools.lru_cache(maxsize=8)
def _shipped(op: str) -> Trees | None:
    path = FOLDER / f"prior-{op}.npz"
    return Trees.load(path) if path.exists() else None
