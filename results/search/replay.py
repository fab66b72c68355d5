"""Replays of the tuner's search and of other strategies, on recorded trials or on surrogates fitted to them. Nothing is measured.

- `recorded`: the measured configs of a problem, each with its latest figure. A search can ask for no other config.
- a surrogate: trees fitted to all trials, either `boosted` or a `forest` of extremely randomised trees. Each config gets a fixed
  random offset with half the trees' error on left-out configs.

A surrogate covers the whole space. Its best config is the fastest among the recorded configs, random configs, and descents from
the best of these. A search receives latencies with noise, like those of real trials. Its result is judged without noise.
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
from autotax.db.records import Place
from autotax.db.shipped import distance, precedents
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.runner.measurement import Candidate, Measurement
from autotax.software import environment
from autotax.spaces import Space, VariantSpace, space_for
from autotax.tuner.model import Prior, Trees
from autotax.tuner.search import Search
from results.search.landscapes import Landscapes

RECORDED = "recorded"
NOISE = 0.015
"""Standard deviation of the noise in the latencies that a search on a surrogate receives."""
FEWEST, FEWEST_FITTED = 40, 12
"""Least number of recorded configs for a replay of a problem, on them and on a surrogate."""
STARTS, DESCENT = 12, 25
"""Configs from which descents look for the best of a surrogate, and the most steps of each descent."""
SHARES, LOSSES = (0.01, 0.03), (12, 16)
"""For a Summary: distances from the best that a search should reach, and the numbers of trials after which its loss is reported.
"""
EVERY = 4
"""Trials between two questions to the model for the expected gain."""
MOST_PATIENT = 1
"""Most unrecorded suggestions of Optuna in a row, on recorded points. Nearly all suggestions are unrecorded, and each takes time.
"""


@dataclass
class Landscape:
    """The latencies on which a search is replayed. `us` gives the latency of a config of the space, in microseconds."""

    problem: Problem
    hardware: Hardware
    space: Space
    kind: str
    us: Callable[[Config], float]
    best_us: float
    error: float = 0.0
    """Error of a surrogate in log latency, on configs outside its training set; 0 for recorded points."""
    start: list[Config] = field(default_factory=list)
    """Former winners of other problems."""


class _Remembering(VariantSpace):
    """A variant that checks each config once, because the searches of a landscape ask about the same configs again and again."""

    checked: dict[Config, str | None]

    def __init__(self, of: VariantSpace) -> None:
        super().__init__(of.variant, of.parameters, of.constraints, of.seeds, of.former)
        object.__setattr__(self, "checked", {})

    def why_not(self, config: Config) -> str | None:
        if config not in self.checked:
            self.checked[config] = super().why_not(config)
        return self.checked[config]


class _Points(VariantSpace):
    """A variant that has only the given points."""

    points: tuple[Config, ...]

    def __init__(self, of: VariantSpace, points: Sequence[Config]) -> None:
        super().__init__(of.variant, of.parameters, of.constraints, tuple(seed for seed in of.seeds if seed in points), of.former)
        object.__setattr__(self, "points", tuple(points))

    def why_not(self, config: Config) -> str | None:
        return None if config in self.points else "it was not recorded"

    def configs(self) -> Iterator[Config]:
        return iter(self.points)

    def point(self, random: random.Random) -> Config:
        return random.choice(self.points)


def searched(problem: Problem, hardware: Hardware) -> Space:
    """The space that the tuner searches. Variants of role `ladder` are included only if one of their configs has won before."""
    space = space_for(problem, hardware)
    won = {config.variant for config in _won_elsewhere(problem, hardware, space)}
    ladder = {name for name, variant in registry.of(problem).variants.items() if variant.role == "ladder"}
    kept = {name: _Remembering(variant) for name, variant in space.variants.items() if name not in ladder - won}
    return Space(problem, hardware, kept)  # type: ignore[arg-type]


def recorded_us(file: Landscapes, key: str) -> dict[Config, float]:
    """The latest latency of each config of today's space, from the trials of searches under the usual conditions."""
    return _recorded_us(file, key, searched(file.problem(key), hardware_of(file, key)))


def _recorded_us(file: Landscapes, key: str, space: Space) -> dict[Config, float]:
    latencies: dict[Config, float] = {}
    for run, result in file.of_runs():
        deployed = Conditions.from_dict(file.conditions[result.conditions]) == Conditions()
        of_search = run.problem == key and deployed and result.status in ("ok", "pruned") and not (result.final or run.imported)
        if of_search and (result.latency_us or 0.0) > 0.0 and result.config in space:
            latencies[result.config] = result.latency_us  # type: ignore[assignment]
    return latencies


def hardware_of(file: Landscapes, key: str) -> Hardware:
    """The hardware on which a problem was recorded."""
    digest = next(run.hardware for run in file.runs if run.problem == key and not run.imported)
    return Hardware(**file.hardware[digest])  # type: ignore[arg-type]


def recorded(file: Landscapes, key: str) -> Landscape | None:
    """The recorded points of a problem; None if there are too few, or if no baseline is among them."""
    problem, hardware = file.problem(key), hardware_of(file, key)
    whole = searched(problem, hardware)
    points = _recorded_us(file, key, whole)
    if len(points) < FEWEST or not any(config.variant == next(iter(whole.variants)) for config in points):
        return None
    by_variant = {name: [c for c in points if c.variant == name] for name in whole.variants}
    space = Space(problem, hardware, {name: _Points(whole.variants[name], group) for name, group in by_variant.items() if group})
    start = _won_elsewhere(problem, hardware, space)
    return Landscape(problem, hardware, space, RECORDED, points.__getitem__, min(points.values()), start=start)


def surrogate(file: Landscapes, key: str, kind: str, trees: Trees, seed: int = 0) -> Landscape | None:
    """Trees of this `kind`, on the problems that have enough recorded points."""
    problem, hardware = file.problem(key), hardware_of(file, key)
    space = searched(problem, hardware)
    points = _recorded_us(file, key, space)
    if len(points) < FEWEST_FITTED:
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
    """Shipped winners of other problems. The winner of this problem is left out, because the replayed trials found it."""
    here = Place(hardware, environment(hardware.backend), Conditions())
    others = [winner for winner in shipped.known_winners() if distance(winner.problem_key, problem.key) > 0]
    return precedents(problem, here, others, space.admit)


def _frozen(config: Config, seed: int) -> float:
    """A normally distributed number that depends only on the config and the seed."""
    digest = hashlib.sha256(f"{config.digest}/{seed}".encode()).digest()
    return random.Random(digest).gauss(0.0, 1.0)


# Strategies

Strategy = Callable[[Landscape, int, Prior | None], "Replayed"]


@dataclass
class Replayed:
    """The interface of a search for a replay. `gain` is the model's expected gain of the next trials, None without a model."""

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
    """One search on one landscape. `losses` are the latencies in the order of the trials, divided by the best."""

    losses: tuple[float, ...]
    noisy: tuple[float, ...]
    """The latencies with noise that the search received, divided by the best."""
    gains: tuple[float | None, ...] = ()
    """The expected gain after each trial; only for searches that are played to the end."""

    def within(self, share: float) -> int | None:
        """The number of trials after which the search is within this share of the best; None if never."""
        return next((at for at, loss in enumerate(self.losses, 1) if loss <= 1 + share), None)

    def of_finalists(self, count: int) -> float:
        """The result of a perfect finalist round: the fastest of the `count` configs with the best noisy latencies, over the
        landscape's best.
        """
        order = sorted(range(len(self.noisy)), key=self.noisy.__getitem__)
        return min(self.losses[at] for at in order[:count])

    def best_after(self, trials: int) -> float:
        """The fastest config after `trials` trials, over the landscape's best."""
        return min(self.losses[:trials])


def play(
    on: Landscape, strategy: Strategy, trials: int, seed: int, ahead: int, prior: Prior | None, *, whole: bool = False
) -> Played:
    """Plays a search of `trials` trials. Up to `ahead` configs are requested before the first of them is reported. The search
    ends as soon as its Summary is known, or with `whole` after all trials.
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
        sample = us * math.exp(source.gauss(0.0, noise))
        asked.tell(Measurement(Candidate(config), "ok", None, ((sample,),)))
        losses.append(us / on.best_us)
        noisy.append(sample / on.best_us)
        if whole:
            gains.append(asked.gain() if len(losses) % EVERY == 0 else None)
    return Played(tuple(losses), tuple(noisy), tuple(gains))


@dataclass(frozen=True)
class Summary:
    """The results of a strategy over all searches: median and 95th percentile of each figure."""

    strategy: str
    searches: int
    trials: int
    to_1_percent: tuple[float, float]
    """Trials until the search is within 1 % of the best; infinite if `trials` were not enough."""
    to_3_percent: tuple[float, float]
    loss_after_12: tuple[float, float]
    """The best found latency over the landscape's best, minus 1."""
    loss_after_16: tuple[float, float]

    @classmethod
    def of(cls, strategy: str, played: Sequence[Played], trials: int) -> Summary:
        """From at least one search."""
        within = [[float(search.within(share) or math.inf) for search in played] for share in SHARES]
        lost = [[search.best_after(after) - 1 for search in played] for after in LOSSES]
        one, three, twelve, sixteen = ((statistics.median_low(v), _percentile(v, 0.95)) for v in (*within, *lost))
        return cls(strategy, len(played), trials, one, three, twelve, sixteen)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
