"""REPLAY: the tuner's search, and others, on recorded trials and on surrogates that are fitted to them. Nothing is measured.

- `recorded`: the configs of a problem that were measured, each with its latest figure; nothing else can be asked for.
- a surrogate: trees that were fitted to all trials (`boosted`, or a `forest` of extremely randomised ones), with half their error
  on configs left out as frozen roughness.

A surrogate has the whole space. Its best is the least of what was recorded, of random configs, and of descents from the best of
these; nobody knows a better one. What a search is told has noise, as figures of a search have; what it found is judged without.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.db import shipped
from autotax.db.landscapes import Landscapes
from autotax.db.records import Place
from autotax.db.shipped import distance, precedents
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.runner.measurement import Candidate, Measurement
from autotax.software import environment
from autotax.spaces import Space, VariantSpace, space_for
from autotax.tuner.prior import Prior, Trees
from autotax.tuner.search import Search

RECORDED = "recorded"
NOISE = 0.015
"""Standard deviation of what a search is told on a surrogate."""
FEWEST = 40
"""Recorded configs of a problem that is replayed."""
STARTS, DESCENT = 12, 25
"""Configs from which the best of a surrogate is sought, and the most steps from each."""
SHARES, LOSSES = (0.01, 0.03), (12, 16)
"""Of a Summary: how near the best a search is to come, and after how many trials its loss is told."""
EVERY = 4
"""Trials after which a model is asked again what more of them would win."""
MOST_PATIENT = 1
"""Suggestions of Optuna's in a row, on recorded points, that were not recorded: nearly all are not, and each takes its time."""


@dataclass
class Landscape:
    """What a search is played on. `us` gives the latency of a config of the space, in microseconds."""

    problem: Problem
    hardware: Hardware
    space: Space
    kind: str
    us: Callable[[Config], float]
    best_us: float
    error: float = 0.0
    """Of a surrogate, in log latency, on configs that it was not fitted to; 0 of recorded points."""
    start: list[Config] = field(default_factory=list)
    """What won before, on other problems."""


class _Remembering(VariantSpace):
    """A variant that checks each config once: searches of a landscape ask about the same ones again and again."""

    checked: dict[Config, str | None]

    def __init__(self, of: VariantSpace) -> None:
        super().__init__(of.variant, of.parameters, of.constraints, of.seeds)
        object.__setattr__(self, "checked", {})

    def why_not(self, config: Config) -> str | None:
        if config not in self.checked:
            self.checked[config] = super().why_not(config)
        return self.checked[config]


class _Points(VariantSpace):
    """A variant of which nothing but some points is there."""

    points: tuple[Config, ...]

    def __init__(self, of: VariantSpace, points: Sequence[Config]) -> None:
        super().__init__(of.variant, of.parameters, of.constraints, tuple(seed for seed in of.seeds if seed in points))
        object.__setattr__(self, "points", tuple(points))

    def why_not(self, config: Config) -> str | None:
        return None if config in self.points else "it was not recorded"

    def configs(self) -> Iterator[Config]:
        return iter(self.points)

    def point(self, random: random.Random) -> Config:
        return random.choice(self.points)


def searched(problem: Problem, hardware: Hardware) -> Space:
    """What the tuner searches: variants of role `ladder` only where one of theirs has won before."""
    space = space_for(problem, hardware)
    won = {config.variant for config in _won_elsewhere(problem, hardware, space)}
    ladder = {name for name, variant in registry.of(problem).variants.items() if variant.role == "ladder"}
    kept = {name: _Remembering(variant) for name, variant in space.variants.items() if name not in ladder - won}
    return Space(problem, hardware, kept)  # type: ignore[arg-type]


def recorded_us(file: Landscapes, key: str) -> dict[Config, float]:
    """The latest latency of each config that is searched now, searches alone, as deployed."""
    return _recorded_us(file, key, searched(file.problem(key), hardware_of(file, key)))


def _recorded_us(file: Landscapes, key: str, space: Space) -> dict[Config, float]:
    found: dict[Config, float] = {}
    for run, result in file.of_runs():
        deployed = Conditions.from_dict(file.conditions[result.conditions]) == Conditions()
        of_search = run.problem == key and deployed and result.status in ("ok", "pruned") and not (result.final or run.imported)
        if of_search and result.latency_us is not None and result.config in space:
            found[result.config] = result.latency_us
    return found


def hardware_of(file: Landscapes, key: str) -> Hardware:
    """Where a problem was recorded."""
    digest = next(run.hardware for run in file.runs if run.problem == key and not run.imported)
    return Hardware(**file.hardware[digest])  # type: ignore[arg-type]


def recorded(file: Landscapes, key: str) -> Landscape | None:
    """The recorded points of a problem; None where there are too few, or no baseline among them."""
    problem, hardware = file.problem(key), hardware_of(file, key)
    whole = searched(problem, hardware)
    points = _recorded_us(file, key, whole)
    if len(points) < FEWEST or not any(config.variant == next(iter(whole.variants)) for config in points):
        return None
    by_variant = {name: [c for c in points if c.variant == name] for name in whole.variants}
    space = Space(problem, hardware, {name: _Points(whole.variants[name], found) for name, found in by_variant.items() if found})
    start = _won_elsewhere(problem, hardware, space)
    return Landscape(problem, hardware, space, RECORDED, points.__getitem__, min(points.values()), start=start)


def surrogate(file: Landscapes, key: str, kind: str, trees: Trees, seed: int = 0) -> Landscape | None:
    """Trees of this `kind`, on the problems that have enough recorded points."""
    problem, hardware = file.problem(key), hardware_of(file, key)
    space = searched(problem, hardware)
    points = _recorded_us(file, key, space)
    if len(points) < FEWEST:
        return None
    prior, memory = Prior(problem, hardware, trees), dict[Config, float]()

    def fill(configs: Sequence[Config]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in memory]
        rough = np.array([_frozen(config, seed) for config in new])
        memory.update(zip(new, np.exp(prior(new) + trees.error / 2 * rough), strict=True))

    def us(config: Config) -> float:
        if config not in memory:
            fill([config])
        return float(memory[config])

    source = random.Random(seed)
    drawn = [config for variant in space.variants.values() for config in variant.some(150, source)]
    fill(candidates := [*points, *drawn, *space.seeds()])
    candidates = sorted(set(candidates), key=lambda config: (us(config), config.digest))
    best = us(candidates[0])
    for config in candidates[:STARTS]:
        for _ in range(DESCENT):
            fill(near := space.neighbours(config))
            lower = min(near, key=us, default=config)
            if us(lower) >= us(config):
                break
            config = lower
        best = min(best, us(config))
    return Landscape(problem, hardware, space, kind, us, best, trees.error, _won_elsewhere(problem, hardware, space))


def _won_elsewhere(problem: Problem, hardware: Hardware, space: Space) -> list[Config]:
    """What won other problems, by what is shipped: those that won this one were found by the trials that are replayed."""
    here = Place(hardware, environment(hardware.backend), Conditions())
    others = [winner for winner in shipped.known_winners() if distance(winner.problem_key, problem.key) > 0]
    return precedents(problem, here, others, space.__contains__)


def _frozen(config: Config, seed: int) -> float:
    """A normal number that belongs to a config."""
    digest = hashlib.sha256(f"{config.digest}/{seed}".encode()).digest()
    return random.Random(digest).gauss(0.0, 1.0)


# Strategies

Strategy = Callable[[Landscape, int, Prior | None], "Replayed"]


@dataclass
class Replayed:
    """A search as a replay sees it. `gain` is what the model expects of the next trials, None where there is no model."""

    ask: Callable[[], Config | None]
    tell: Callable[[Measurement], None]
    gain: Callable[[], float | None] = lambda: None


def _tuner(sampler: str, *, prior: bool = True, start: bool = True, skip: bool = True) -> Strategy:
    def begin(on: Landscape, seed: int, held_out: Prior | None) -> Replayed:
        flat = Prior(on.problem, on.hardware, None)
        settings = Settings(sampler=sampler, seed=seed)
        known = held_out if prior and held_out else flat
        search = Search(on.space, settings, on.start if start else (), prior=known)
        if not start:
            search.forget_queue()
        if not skip:
            search.slow = math.inf
        if on.kind == RECORDED:
            search.patience = MOST_PATIENT
        return Replayed(search.ask, search.tell, lambda: search.gain)

    return begin


STRATEGIES: dict[str, Strategy] = {
    "prior and GP, in turn with the queue": _tuner("gp"),
    "the same, nothing skipped": _tuner("gp", skip=False),
    "GP without a prior, in turn with the queue": _tuner("gp", prior=False),
    "prior and GP alone": _tuner("gp", start=False),
    "queue, neighbours and TPE (before)": _tuner("tpe"),
    "TPE alone": _tuner("tpe", start=False),
    "random": _tuner("random", start=False),
}


@dataclass(frozen=True)
class Played:
    """One search on one landscape: the latency of each config in the order in which it was measured, over the best."""

    losses: tuple[float, ...]
    told: tuple[float, ...]
    """What the search was told, over the best: the same with noise."""
    gains: tuple[float | None, ...] = ()
    """What the model expected of the next trials, after each one; only of searches that are played to the end."""

    def within(self, share: float) -> int | None:
        """After how many trials the best found is within this share of the best; None if never."""
        return next((at for at, loss in enumerate(self.losses, 1) if loss <= 1 + share), None)

    def of_finalists(self, count: int) -> float:
        """The best of so many configs that looked best, over the landscape's best: what a round of finalists could find."""
        order = sorted(range(len(self.told)), key=self.told.__getitem__)
        return min(self.losses[at] for at in order[:count])

    def best_after(self, trials: int) -> float:
        """The best over the landscape's best, after so many trials."""
        return min(self.losses[:trials])


def play(
    on: Landscape, strategy: Strategy, trials: int, seed: int, ahead: int, prior: Prior | None, *, whole: bool = False
) -> Played:
    """A search of so many trials, `ahead` of which are asked for before the first of them is told. It ends as soon as its
    Summary is known, unless it is to be played to the end, as a whole.
    """
    source = random.Random(f"{seed}/{on.problem.key}")
    asked = strategy(on, seed, prior)
    noise = NOISE if on.kind != RECORDED else 0.0
    coming: list[Config] = []
    losses: list[float] = []
    noisy: list[float] = []
    gains: list[float | None] = []
    while len(losses) < trials and (whole or len(losses) < LOSSES[-1] or min(losses) > 1 + SHARES[0]):
        while len(coming) < (ahead if losses or coming else 1) and (config := asked.ask()):
            coming.append(config)
        if not coming:
            break
        config = coming.pop(0)
        us = on.us(config)
        told = us * math.exp(source.gauss(0.0, noise))
        asked.tell(Measurement(Candidate(config), "ok", None, ((told,),)))
        losses.append(us / on.best_us)
        noisy.append(told / on.best_us)
        if whole:
            gains.append(asked.gain() if len(losses) % EVERY == 0 else None)
    return Played(tuple(losses), tuple(noisy), tuple(gains))


@dataclass(frozen=True)
class Summary:
    """What a strategy found in all searches: the median and the 95th percentile."""

    strategy: str
    searches: int
    trials: int
    to_1_percent: tuple[float, float]
    """Trials to within 1 % of the best; infinite where so many were not enough."""
    to_3_percent: tuple[float, float]
    loss_after_12: tuple[float, float]
    """Of the best found over the landscape's best, less 1."""
    loss_after_16: tuple[float, float]

    @classmethod
    def of(cls, strategy: str, played: Sequence[Played], trials: int) -> Summary:
        """From at least one search."""
        within = [[float(each.within(share) or math.inf) for each in played] for share in SHARES]
        lost = [[each.best_after(after) - 1 for each in played] for after in LOSSES]
        one, three, twelve, sixteen = ((statistics.median_low(v), _percentile(v, 0.95)) for v in (*within, *lost))
        return cls(strategy, len(played), trials, one, three, twelve, sixteen)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
