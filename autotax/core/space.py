"""Search spaces: the parameters of each variant, and the constraints that say which combinations are valid.

A space is a pure function of (problem, hardware): equal arguments give equal spaces on every rank and in every process.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from random import Random
from typing import Any, Protocol

from autotax.core.config import Config, Value
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware

RANDOM_ATTEMPTS = 2000
"""Random points that are tried before the space is enumerated in order."""


class Suggester(Protocol):
    """The part of an Optuna trial that a space uses."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


@dataclass(frozen=True)
class Constraint:
    """A condition on some parameters; `reason` says what is wrong if it does not hold."""

    names: tuple[str, ...]
    holds: Callable[..., bool]
    reason: str


@dataclass(frozen=True)
class VariantSpace:
    """The parameters of one variant, its constraints, and configs worth trying first (the first one is its default)."""

    variant: str
    parameters: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    seeds: tuple[Config, ...] = ()
    former: dict[str, Value] = field(default_factory=dict)
    """Values of newer parameters, with which a config does what it did before they existed."""

    def completed(self, config: Config) -> Config:
        """The config, with the parameters that it is older than."""
        return Config.of(self.variant, self.former | config.values) if self.former else config

    def why_not(self, config: Config) -> str | None:
        values = config.values
        if values.keys() != self.parameters.keys():
            return f"{self.variant} takes {', '.join(self.parameters) or 'no parameters'}"
        for name, choices in self.parameters.items():
            if values[name] not in choices:
                return f"{name} is {values[name]}; allowed are {', '.join(map(str, choices))}"
        return next((self._explain(c, values) for c in self.constraints if not self._holds(c, values)), None)

    def configs(self) -> Iterator[Config]:
        """Every config that is admitted, by backtracking: a constraint is tried as soon as its parameters have values."""
        names = list(self.parameters)
        ripe: dict[int, list[Constraint]] = {}
        for constraint in self.constraints:
            ripe.setdefault(max((names.index(name) for name in constraint.names), default=0), []).append(constraint)

        def extend(depth: int, values: dict[str, Value]) -> Iterator[Config]:
            if depth == len(names):
                yield Config.of(self.variant, values)
                return
            for choice in self.parameters[names[depth]]:
                values[names[depth]] = choice
                if all(self._holds(constraint, values) for constraint in ripe.get(depth, ())):
                    yield from extend(depth + 1, values)

        yield from extend(0, {})

    def default(self) -> Config:
        """The static default: the first admitted seed, or else the first config that is admitted at all."""
        seed = next((seed for seed in self.seeds if self.why_not(seed) is None), None)
        return seed or next(self.configs())

    def point(self, random: Random) -> Config:
        """Random values for all parameters. The config may break a constraint: see `why_not`."""
        return Config.of(self.variant, {name: random.choice(choices) for name, choices in self.parameters.items()})

    def some(self, count: int, random: Random) -> list[Config]:
        """Up to `count` admitted configs: seeds, then random ones, then in order if the space has few."""
        configs: dict[Config, None] = {}
        for config in chain(self.seeds, (self.point(random) for _ in range(RANDOM_ATTEMPTS)), self.configs()):
            if len(configs) == count:
                break
            if self.why_not(config) is None:
                configs[config] = None
        return list(configs)

    @staticmethod
    def _holds(constraint: Constraint, values: dict[str, Value]) -> bool:
        return constraint.holds(*(values[name] for name in constraint.names))

    @staticmethod
    def _explain(constraint: Constraint, values: dict[str, Value]) -> str:
        return f"{constraint.reason} ({', '.join(f'{name} {values[name]}' for name in constraint.names)})"


@dataclass(frozen=True)
class Space:
    """All variants of an operator for one problem on one machine, the simplest variant (bsp) first."""

    problem: Problem
    hardware: Hardware
    variants: dict[str, VariantSpace]

    def __contains__(self, config: Config) -> bool:
        return self.why_not(config) is None

    def __iter__(self) -> Iterator[Config]:
        for variant in self.variants.values():
            yield from variant.configs()

    @functools.cached_property
    def count(self) -> int:
        """How many configs are admitted."""
        return sum(1 for _ in self)

    @functools.cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that name the variants and the choices of their parameters."""
        choices = {name: variant.parameters for name, variant in self.variants.items()}
        return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]

    def completed(self, config: Config) -> Config:
        """See VariantSpace.completed. A config of a variant that is not in this space stays as it is."""
        return self.variants[config.variant].completed(config) if config.variant in self.variants else config

    def admit(self, config: Config) -> Config | None:
        """The config, with the parameters that it is older than, if this space has it; else None."""
        completed = self.completed(config)
        return completed if completed in self else None

    def why_not(self, config: Config) -> str | None:
        """Why a config is not admitted, or None if it is."""
        if config.variant not in self.variants:
            return f"the variant is {config.variant}; allowed are {', '.join(self.variants)}"
        return self.variants[config.variant].why_not(config)

    def seeds(self) -> list[Config]:
        """Configs worth trying first: the default of each variant, then the second seed of each, and so on."""
        firsts = [self.default(name) for name in self.variants]
        rounds = zip_longest(*(dict.fromkeys(variant.seeds) for variant in self.variants.values()))
        others = [seed for seeds in rounds for seed in seeds if seed and seed in self]
        return list(dict.fromkeys(firsts + others))

    def default(self, variant: str) -> Config:
        """The static default of a variant."""
        return self.variants[variant].default()

    def neighbours(self, config: Config) -> list[Config]:
        """The admitted configs that differ in one parameter: numbers by the next choice up or down, words by any other choice."""
        neighbours = []
        for name, choices in self.variants[config.variant].parameters.items():
            at = choices.index(config[name])
            near = (at - 1, at + 1) if isinstance(config[name], int) else range(len(choices))
            values = [choices[i] for i in near if 0 <= i < len(choices) and i != at]
            neighbours += [Config.of(config.variant, config.values | {name: value}) for value in values]
        return [neighbour for neighbour in neighbours if neighbour in self]

    def only(self, names: Sequence[str]) -> Space:
        """The space of some variants. Raises UsageError for a variant that is not in it."""
        if unknown := [name for name in names if name not in self.variants]:
            raise UsageError(
                f"variant is {', '.join(unknown)}; {self.problem} has {', '.join(self.variants)}: "
                "give some of these as --variants"
            )
        return Space(self.problem, self.hardware, {name: v for name, v in self.variants.items() if name in names})

    def suggest(self, trial: Suggester) -> Config:
        """Asks an Optuna trial for a point. The point may violate a constraint: see `why_not`."""
        variant = self.variants[trial.suggest_categorical("variant", list(self.variants))]
        values = {
            name: trial.suggest_categorical(f"{variant.variant}.{name}", list(choices))
            for name, choices in variant.parameters.items()
        }
        return Config.of(variant.variant, values)

    @staticmethod
    def as_suggestion(config: Config) -> dict[str, Value]:
        """The parameters to enqueue in a study so that `suggest` returns this config."""
        return {"variant": config.variant} | {f"{config.variant}.{name}": value for name, value in config.params}


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low ... up to `high`; at least `low`."""
    values = [low]
    while values[-1] * 2 <= high:
        values.append(values[-1] * 2)
    return tuple(values)
