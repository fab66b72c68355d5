"""Search: chooses the next config to measure for one problem on one machine.

Bulk-synchronous comes first, then one config of ours. Then what others wrote takes turns with one config of each variant, so
that no search ends without them. After these two sources take turns (docs/search.md): a queue and the sampler. The queue holds
seeds and former winners, then neighbours of the best configs. The sampler `gp` is the model of autotax.tuner.model; the other
samplers are Optuna's. A suggestion of Optuna that breaks a constraint, or that has been measured, costs no trial. It is
reported to Optuna as pruned, because the sampler ignores failed trials. Then Optuna is asked again; after PATIENCE such
suggestions in a row a new random config is taken.

This module uses no database, so replays use the same search.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest

import numpy as np
import optuna
from optuna.trial import TrialState

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.core.space import RANDOM_ATTEMPTS
from autotax.db import Store
from autotax.db.records import Place
from autotax.db.shipped import known_precedents
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.runner.measurement import PAIRED, Measurement, Runner
from autotax.software import Environment
from autotax.spaces import Space, space_for
from autotax.tuner.model import Model, Prior, prior_for, usual_sampler
from autotax.tuner.run_recorder import finished, sampler_for

PATIENCE = 12
"""Unusable suggestions in a row before a random new config is taken."""
BEST = 3
"""Best configs whose neighbours are tried, beginning with the very best."""
SLOW, ENOUGH = 1.3, 4
"""A config predicted to take SLOW times the best is not measured, once ENOUGH are verified. Only with a trained prior."""
FEWEST = 12
"""Verified configs before the model estimates the gain of further trials."""


class Search:
    """Suggests configs of a space and learns from their measurements. `precedents` are former winners. Configs in `measured` are
    measured already; configs in `deadly` are never suggested. `prior` replaces the shipped prior.
    """

    def __init__(
        self, space: Space, settings: Settings, precedents: Sequence[Config] = (), measured: Sequence[Measurement] = (),
        deadly: Sequence[Config] = (), prior: Prior | None = None,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = space
        self.seen = {config.digest for config in (*(measurement.config for measurement in measured), *deadly)}
        self._settings = settings
        self._prior = prior or prior_for(space.problem, space.hardware)
        self._random = random.Random(settings.seed)
        self._turn = 0
        self._alone = False
        self.patience = PATIENCE
        self.slow = SLOW
        self._latencies: dict[Config, float] = {}
        self._pending: list[Config] = []
        self._model: Model | None = None
        self._asked: dict[Config, optuna.trial.Trial] = {}
        self._sampler_name = settings.sampler or usual_sampler(space.problem, space.hardware)
        self._sampler = optuna.create_study(sampler=sampler_for(self._sampler_name, settings.seed), direction="minimize")
        first, *others = space.seeds()  # bulk-synchronous, the baseline of all comparisons, and the rest
        in_turn = [config for pair in zip_longest(precedents, others) for config in pair if config]
        firsts, peers = one_of_each([first, *precedents, *others]), registry.of(space.problem).peers
        # Else a variant that is newer than the prior would have its turn after those that have won elsewhere, often too late.
        firsts[2:] = sorted(firsts[2:], key=lambda config: self._prior.knows(config.variant))
        self._start = [config for config in dict.fromkeys([*firsts, *in_turn]) if config.variant not in peers]
        self._queue = deque(self._start)
        self._alternatives = deque(config for config in others if config.variant in peers)
        for measurement in measured:
            self._learn(measurement)

    def suggest_next(self, config: Config) -> None:
        """Puts a config at the end of the queue."""
        self._queue.append(config)

    def forget_queue(self) -> None:
        """Empties the queue, so that only the sampler suggests, as replays want. Bulk-synchronous still comes first."""
        self._queue, self._alternatives = deque(self._start[:1]), deque()
        self._alone = True

    def ask(self) -> Config | None:
        """The next config to measure; None when the space is exhausted. No config is returned twice in a run."""
        config = self._next()
        if config:
            self.seen.add(config.digest)
            self._pending.append(config)
        return config

    def upcoming(self, count: int) -> Iterator[Config]:
        """Configs that are likely to be asked for soon, alternately from the queue and, once there is a model, from the model.
        They are computed lazily, because they are needed only if a compiler is idle.
        """
        queued = filter(self._usable, self._queue)
        foreseen = self._model.foreseen(self._free(), self._pending) if self._model else ()
        in_turn = (config for pair in zip_longest(queued, foreseen) for config in pair if config)
        yield from dict.fromkeys(islice(in_turn, count))

    def tell(self, measurement: Measurement) -> None:
        """Learns the outcome."""
        if measurement.config in self._pending:
            self._pending.remove(measurement.config)
        self._learn(measurement)

    @property
    def gain(self) -> float | None:
        """Expected gain of the next trials, as a share of the best latency; None without a model."""
        if self._sampler_name != "gp" or len(self._latencies) < FEWEST:
            return None
        return self._believed().gain(self._free())

    def _next(self) -> Config | None:
        """Alternates between queue and sampler; the queue goes first and starts with bulk-synchronous. From the third turn on the
        alternatives take the place of the sampler, as long as there are any.
        """
        self._turn += 1
        by_model = self._sampler_name == "gp"
        early = self._turn > 2 and bool(self._alternatives)
        while early and self._turn % 2 and self._alternatives:
            if self._usable(alternative := self._alternatives.popleft()):
                return alternative
        if by_model and not early and (self._turn % 2 == 0 or (self._alone and self.seen)) and (config := self._by_model()):
            return config
        while self._queue:
            if self._usable(config := self._queue.popleft()) and not self._slow(config):
                return config
        if neighbour := self._neighbour(by_model):
            return neighbour
        if by_model:
            return self._by_model() or next(filter(self._usable, self._others()), None)
        return self._by_optuna() or next(filter(self._usable, self._others()), None)

    def _neighbour(self, by_model: bool) -> Config | None:
        """A new neighbour of one of the best configs, or None. With Optuna's samplers it gives one every second time."""
        if self._alone or self._sampler_name == "random" or (not by_model and self._turn % 2):
            return None
        for best in sorted(self._latencies, key=self._latencies.__getitem__)[:BEST]:
            if fresh := [c for c in self.space.neighbours(best) if self._usable(c) and not self._slow(c)]:
                return self._random.choice(fresh)
        return None

    def _slow(self, config: Config) -> bool:
        """Whether a config is left out because its predicted latency is too high. The model may change its prediction and ask for
        the config later. Bulk-synchronous is never left out, nor a variant without training data in the prior.
        """
        if self._sampler_name != "gp" or config.variant == "bsp" or len(self._latencies) < ENOUGH:
            return False
        model = self._believed()
        return model.prior.knows(config.variant) and model.predicted(config) > math.log(self.slow)

    def _by_model(self) -> Config | None:
        return self._believed().suggest(self._free(), self._pending)

    def _believed(self) -> Model:
        """The model. It is built at the first request from all measurements so far."""
        if self._model is None:
            self._model = Model(self.space, self._prior, self._settings.seed, filter(self.space.__contains__, self._start))
            for config, us in self._latencies.items():
                self._model.tell(config, us)
        return self._model

    def _free(self) -> np.ndarray:
        return np.array([config.digest not in self.seen for config in self._believed().configs], bool)

    def _by_optuna(self) -> Config | None:
        for _ in range(self.patience):
            trial = self._sampler.ask()
            config = self.space.suggest(trial)
            if self._usable(config):
                self._asked[config] = trial
                return config
            self._sampler.tell(trial, state=TrialState.PRUNED)
        return None

    def _learn(self, measurement: Measurement) -> None:
        trial = finished(self.space, measurement)
        if suggestion := self._asked.pop(measurement.config, None):
            self._sampler.tell(suggestion, values=trial.value, state=trial.state)
        elif measurement.config in self.space:
            self._sampler.add_trial(trial)
        if trial.value is not None and measurement.config in self.space:
            self._latencies[measurement.config] = trial.value
            if self._model:
                self._model.tell(measurement.config, trial.value)

    def _usable(self, config: Config) -> bool:
        return config.digest not in self.seen and config in self.space

    def _others(self) -> Iterator[Config]:
        """Random configs of the space, then all configs in order."""
        variants = list(self.space.variants.values())
        for _ in range(RANDOM_ATTEMPTS):
            yield self._random.choice(variants).point(self._random)
        yield from self.space


# Paired search: each trial is measured in one job with the incumbent, sample by sample in turn.

def paired(incumbent: Measurement, again: Measurement, measured: Measurement) -> Measurement:
    """`measured` with the figure that follows from its job, in which the incumbent was measured `again`. If one of the two
    failed, `measured` is returned unchanged.
    """
    level = incumbent.score_us
    if level is None or not (again.status == measured.status == "ok" and again.samples and measured.samples):
        return measured
    ratio = statistics.median(mine / other for mine, other in zip(measured.rounds, again.rounds, strict=True))
    pair = {"with": incumbent.config.digest, "ratio": round(ratio, 5), "us": round(level * ratio, 4)}
    return replace(measured, conditions=measured.conditions | {PAIRED: pair})


# Suspiciously fast configs are measured again, and the slower figure of the two is kept.

SUSPICIOUS = 0.75
"""A latency below this share of the best so far is doubted ..."""
KNOWN = 5
"""... once this many figures are known."""
ALIKE = 0.1
"""Figures that differ by a smaller share agree."""


def doubtful(measurement: Measurement, measured: Sequence[Measurement]) -> bool:
    """Whether a measurement is suspiciously fast after those before it."""
    before = [m.latency_us for m in measured if m.status == "ok" and m.latency_us is not None]
    if measurement.status != "ok" or measurement.latency_us is None or len(before) < KNOWN:
        return False
    return measurement.latency_us < SUSPICIOUS * min(before)


def settled(first: Measurement, again: Measurement) -> tuple[Measurement, str | None]:
    """Chooses between a doubted measurement and its repetition; returns the slower, and a notice if they do not agree."""
    first_us, again_us = first.latency_us, again.latency_us
    assert first_us is not None
    stands = first if again.status == "ok" and again_us is not None and again_us <= first_us else again
    stands = replace(stands, conditions=stands.conditions | {"measured_again": first_us})
    if again_us is not None and again.verified and abs(again_us - first_us) <= ALIKE * first_us:
        return stands, None
    second = f"{again_us:.1f} us" if again_us is not None else again.status
    return stands, f"{first.config} took {first_us:.1f} us, suspiciously little; measured again: {second}, and the worse stands"


# The opening of a run: the space that it searches, and the configs that it asks for first.

UPCOMING = 16
"""Configs for idle compilers to begin with. More than the number of compilers would be of no use."""


def opened(settings: Settings, problem: Problem, hardware: Hardware, space: Space | None = None) -> tuple[Settings, Space]:
    """Settings with all defaults, and the space of the variants that they name. Raises UsageError for what does not fit."""
    space = space or space_for(problem, hardware)
    if settings.variants:
        space = space.only(("bsp", *settings.variants) if "bsp" in space.variants else settings.variants)
    settings = settings.on(hardware)
    return replace(settings, sampler=settings.sampler or usual_sampler(problem, hardware)), space


def one_of_each(configs: Iterable[Config]) -> list[Config]:
    """The first config of each variant. Short searches end before the defaults of variants that have never won come in turn."""
    firsts: dict[str, Config] = {}
    for config in configs:
        firsts.setdefault(config.variant, config)
    return list(firsts.values())


def without_ladder(space: Space, won: Collection[Config]) -> Space:
    """The space without the variants of the ladder that never won: they only explain where time goes."""
    winners = {config.variant for config in won}
    ladder = {name for name, variant in registry.of(space.problem).variants.items() if variant.role == "ladder"}
    return space.only([name for name in space.variants if name not in ladder - winners])


def compile_ahead(
    problem: Problem, hardware: Hardware, runner: Runner, store: Store, environment: Environment, settings: Settings
) -> None:
    """Gives idle compilers the first configs of a new run of this problem."""
    settings, space = opened(settings, problem, hardware)
    assert settings.conditions is not None
    won = known_precedents(problem, Place(hardware, environment, settings.conditions), store, space.admit)
    search = Search(space if settings.variants else without_ladder(space, won), settings, won)
    first = iter(search.ask, None)
    first_configs = [config for config, _ in zip(first, range(min(runner.foresight, settings.trials)), strict=False)]
    runner.expect(problem, [], chain(first_configs, search.upcoming(UPCOMING)))
