"""FEATURES of (problem, config) for models of latencies: sizes, parameters, and what arithmetic says of them (`traits`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators import registry

Named = dict[str, float]


def has_traits(problem: Problem) -> bool:
    """Whether the operator tells what a model can learn from."""
    return registry.of(problem).traits is not None


def log_base(problem: Problem) -> float:
    """The logarithm of the analytical time, in microseconds."""
    return math.log(registry.of(problem).traits_module().base_us(problem))


def named(problem: Problem, hardware: Hardware, config: Config) -> Named:
    """Features by name. Numbers are logarithms; a word is 1 under `name=word`, and 0 where a name is not there."""
    return _of("p", problem.to_dict()) | _of_config(problem, hardware, config)


def matrix(problem: Problem, hardware: Hardware, configs: Sequence[Config], names: Sequence[str]) -> np.ndarray:
    """Float32 [configs, names]; what a config has no feature of is 0 for words, -1 for numbers."""
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
