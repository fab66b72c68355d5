"""WHICH NEXT: the Optuna study of one problem on one machine.

Seeds come first. A suggestion that breaks a constraint, or that has been measured, costs no trial: it is told as pruned
(never as failed, which blinds the sampler) and the next one is asked for; after a few in a row a random config that is
new takes its place.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterator

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from autotax.config import Config
from autotax.runner.measurement import Measurement
from autotax.spaces import Space
from autotax.tuner.progress import Settings

PATIENCE = 12
"""Unusable suggestions in a row before a random new config is taken."""
RANDOM_ATTEMPTS = 2000


Suggestion = tuple[optuna.trial.Trial, Config]
"""A trial of the study and the config that it stands for."""


class Search:
    """Suggests configs and learns from their measurements; `seen` holds the digests that need no measuring any more."""

    def __init__(self, space: Space, storage_url: str, name: str, settings: Settings, seen: set[str]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = space
        self.seen = seen
        self._random = random.Random(settings.seed)
        # Not Optuna's own queue, which outlives the run and never takes again what an interrupted run took out of it.
        self._queue = deque(space.seeds())
        storage = _storage(storage_url)
        if not settings.resume:
            _forget(storage, name)
        self._study = optuna.create_study(
            storage=storage, study_name=name, sampler=_sampler(settings), direction="minimize", load_if_exists=True
        )
        # What a killed run left in flight is not known to be bad: it is given up, not failed.
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.PRUNED, skip_if_finished=True)

    def suggest_next(self, config: Config) -> None:
        """Puts a config at the end of the queue that is served before the sampler is asked."""
        self._queue.append(config)

    def ask(self) -> Suggestion | None:
        """The next config to measure, and never again in this run; None when the space is exhausted."""
        if suggestion := self._next():
            self.seen.add(suggestion[1].digest)
        return suggestion

    def _next(self) -> Suggestion | None:
        while self._queue:
            if self._usable(config := self._queue.popleft()):
                return self._trial_of(config)
        for _ in range(PATIENCE):
            trial = self._study.ask()
            config = self.space.suggest(trial)
            if self._usable(config):
                return trial, config
            self._study.tell(trial, state=TrialState.PRUNED)
        other = next((config for config in self._others() if self._usable(config)), None)
        return self._trial_of(other) if other else None

    def _trial_of(self, config: Config) -> Suggestion:
        self._study.enqueue_trial(Space.as_suggestion(config))
        while True:  # what a killed run left in the study's own queue is served before it
            trial = self._study.ask()
            if (asked := self.space.suggest(trial)) == config or self._usable(asked):
                return trial, asked
            self._study.tell(trial, state=TrialState.PRUNED)

    def tell(self, trial: optuna.trial.Trial, measurement: Measurement) -> None:
        """Learns the outcome. Only verified latencies are values; every other outcome is pruned, hence bad."""
        trial.set_user_attr("status", measurement.status)
        if measurement.verified and measurement.latency_us is not None:
            self._study.tell(trial, measurement.latency_us, skip_if_finished=True)
        else:
            self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)

    def give_up(self, trial: optuna.trial.Trial) -> None:
        """Ends a trial that was interrupted; its config may be suggested again."""
        self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)

    def _usable(self, config: Config) -> bool:
        return config.digest not in self.seen and config in self.space

    def _others(self) -> Iterator[Config]:
        """Random points of the space, then all of them."""
        variants = list(self.space.variants.values())
        for _ in range(RANDOM_ATTEMPTS):
            variant = self._random.choice(variants)
            yield Config.of(variant.variant, {n: self._random.choice(c) for n, c in variant.parameters.items()})
        yield from self.space


def _storage(url: str) -> optuna.storages.RDBStorage:
    connect = {"timeout": 30} if url.startswith("sqlite") else {}
    return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": connect})


def _forget(storage: optuna.storages.RDBStorage, name: str) -> None:
    if name in [study.study_name for study in storage.get_all_studies()]:
        optuna.delete_study(study_name=name, storage=storage)


def _sampler(settings: Settings) -> BaseSampler:
    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed=settings.seed)
    if settings.sampler == "gp":
        return optuna.samplers.GPSampler(seed=settings.seed)
    # group: parameters of different variants are modelled apart; multivariate: those of one variant together.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _tpe(settings)


def _tpe(settings: Settings) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=settings.seed, multivariate=True, group=True, n_startup_trials=12)
