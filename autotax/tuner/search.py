"""WHICH NEXT: the Optuna study of one problem on one machine.

Bulk-synchronous comes first, then what won before and seeds in turn. Then the sampler and neighbours of the best configs take
turns: with as few trials as a problem gets, a sampler hardly learns (docs/search.md). A suggestion that breaks a constraint, or
that has been measured, costs no trial: it is told as pruned (never as failed, which blinds the sampler) and the next one is asked
for; after a few in a row a random config that is new takes its place.

Other tuners may be at the same study. One that takes this process for gone, wrongly, ends its trials: they are dropped, or told
anew.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import ParamSpec, TypeVar

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from autotax.config import Config
from autotax.errors import MachineError
from autotax.runner.measurement import Measurement
from autotax.settings import Settings
from autotax.spaces import Space
from autotax.spaces.space import RANDOM_ATTEMPTS
from autotax.tuner.flight import Flight, left_behind
from autotax.tuner.ledger import Ledger
from autotax.tuner.study import open_study, sampler_of, using

PATIENCE = 12
"""Unusable suggestions in a row before a random new config is taken."""
BEST = 3
"""Configs whose neighbours are tried, the best one's first."""
STATUS, INTERRUPTED = "status", "interrupted"
"""Attribute of Optuna's trials: how the measurement ended; and its value where there was none."""
VARIANT, SPEEDUP = "variant", "times faster than BSP"
"""Attributes of Optuna's trials for people."""

P = ParamSpec("P")
R = TypeVar("R")

Suggestion = tuple[optuna.trial.Trial, Config]
"""A trial of the study and the config that it stands for."""


class Search:
    """Suggests configs and learns from their measurements, in the study of this `name`. What is `known` already needs no
    measuring any more; the study is told of it.
    """

    def __init__(self, space: Space, ledger: Ledger, name: str, settings: Settings, known: Sequence[Measurement]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = space
        self.seen = {measurement.config.digest for measurement in known}
        self._url = ledger.store.url
        self._patience = ledger.patience
        self._random = random.Random(settings.seed)
        self._at_random = settings.sampler == "random"
        self._turn = 0
        self._latencies: dict[Config, float] = {}
        first, *others = space.seeds()  # bulk-synchronous, which all are compared with, and the rest
        in_turn = zip_longest(ledger.precedents(space), others)
        self._queue = deque([first, *(config for pair in in_turn for config in pair if config)])
        self._study = self._call(open_study, self._url, name, ledger.run_id, settings)
        self._sampler = self._study.sampler
        self.flight = Flight(self._study, ledger.run_id, ledger.statuses(), self._call)
        self.deadly = [config for config in self.flight.deadly if self._usable(config)]
        """Configs that nothing is known of but that they were in flight when runs were killed. They are not suggested again."""
        self.seen |= {config.digest for config in self.deadly}
        # What else a killed run left in flight is not known to be bad: it is given up, not failed.
        for trial in self._trials(TrialState.RUNNING):
            if left_behind(trial):
                self._drop(trial.number)
        self._teach(known)

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
        if neighbour := self._neighbour():
            return self._trial_of(neighbour)
        for _ in range(PATIENCE):
            trial, config = self._ask()
            if self._usable(config):
                return trial, config
            self._drop(trial)
        other = next((config for config in self._others() if self._usable(config)), None)
        return self._trial_of(other) if other else None

    def _neighbour(self) -> Config | None:
        """Every second time a new neighbour of one of the best configs, as long as there are any."""
        self._turn += 1
        if self._at_random or self._turn % 2:
            return None
        for best in sorted(self._latencies, key=self._latencies.__getitem__)[:BEST]:
            if fresh := [config for config in self.space.neighbours(best) if self._usable(config)]:
                return self._random.choice(fresh)
        return None

    def _trial_of(self, config: Config) -> Suggestion:
        while True:  # what somebody put into the study's own queue is served before it
            trial, asked = self._ask(config)
            if asked == config:
                return trial, asked
            self._drop(trial)

    def _ask(self, config: Config | None = None) -> Suggestion:
        """What the sampler suggests, or this config."""
        self._study.sampler = sampler_of(config) if config else self._sampler
        while True:
            trial = self._call(self._study.ask)
            with suppress(UpdateFinishedTrialError):
                self.flight.own(trial)
                return trial, self._call(self.space.suggest, trial)

    def _drop(self, trial: optuna.trial.Trial | int) -> None:
        """Gives a trial up, unless it has ended meanwhile."""
        with suppress(UpdateFinishedTrialError):
            self._call(self._study.tell, trial, state=TrialState.PRUNED, skip_if_finished=True)

    def begin(self, suggestion: Suggestion) -> None:
        """Notes that a config is measured now: should this process be killed meanwhile, the next one knows of it."""
        self.flight.begin([suggestion[1]])

    def tell(self, trial: optuna.trial.Trial, measurement: Measurement) -> None:
        """Learns the outcome."""
        self._note(measurement)
        state, value = _outcome(measurement)
        try:
            for attribute, told in self._attributes(measurement).items():
                self._call(trial.set_user_attr, attribute, told)
            self._call(self._study.tell, trial, values=value, state=state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            self._teach([measurement])

    def give_up(self, suggestions: Sequence[Suggestion]) -> None:
        """Ends trials that were interrupted, if the database lets it; their configs may be suggested again."""
        with suppress(MachineError), using(self._url):
            for trial, _ in suggestions:
                with suppress(UpdateFinishedTrialError):
                    trial.set_user_attr(STATUS, INTERRUPTED)
                    self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)

    def _teach(self, known: Sequence[Measurement]) -> None:
        """Tells the study what it has not seen: trials from before an edit of other variants, or of another choice of them."""
        finished = self._trials(TrialState.COMPLETE, TrialState.PRUNED)
        told = [trial.params for trial in finished if trial.user_attrs.get(STATUS, INTERRUPTED) != INTERRUPTED]
        for measurement in known:
            self._note(measurement)
            if (params := Space.as_suggestion(measurement.config)) not in told:
                self.space.suggest(spelled := optuna.trial.FixedTrial(params))
                state, value = _outcome(measurement)
                attributes = self._attributes(measurement)
                trial = optuna.trial.create_trial(
                    state=state, value=value, params=params, distributions=spelled.distributions, user_attrs=attributes
                )
                self._call(self._study.add_trial, trial)

    def describe(self, about: Mapping[str, str]) -> None:
        """Notes facts of the study that people read beside it, for instance in optuna-dashboard."""
        known = self._call(lambda: self._study.user_attrs)
        for name, told in about.items():
            if known.get(name) != told:
                self._call(self._study.set_user_attr, name, told)

    def _attributes(self, measurement: Measurement) -> dict[str, str | float]:
        """What people read beside a trial. The speed-up is over the best BSP so far, measured at another time."""
        told: dict[str, str | float] = {STATUS: measurement.status, VARIANT: measurement.config.variant}
        baseline = min((us for config, us in self._latencies.items() if config.variant == "bsp"), default=None)
        if baseline and measurement.verified and measurement.latency_us:
            told[SPEEDUP] = round(baseline / measurement.latency_us, 3)
        return told

    def _note(self, measurement: Measurement) -> None:
        """Remembers what may have neighbours worth a trial."""
        _, value = _outcome(measurement)
        if value is not None and measurement.config in self.space:
            self._latencies[measurement.config] = value

    def _trials(self, *states: TrialState) -> list[optuna.trial.FrozenTrial]:
        return self._call(self._study.get_trials, deepcopy=False, states=states)

    def _call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls something that uses the database, which may be busy."""
        def attempt() -> R:
            with using(self._url):
                return function(*args, **kwargs)

        return self._patience(attempt)

    def _usable(self, config: Config) -> bool:
        return config.digest not in self.seen and config in self.space

    def _others(self) -> Iterator[Config]:
        """Random points of the space, then all of them."""
        variants = list(self.space.variants.values())
        for _ in range(RANDOM_ATTEMPTS):
            yield self._random.choice(variants).point(self._random)
        yield from self.space


def _outcome(measurement: Measurement) -> tuple[TrialState, float | None]:
    """As the sampler is told: only verified latencies are values; every other outcome is pruned, hence bad."""
    if measurement.verified and measurement.latency_us is not None:
        return TrialState.COMPLETE, measurement.latency_us
    return TrialState.PRUNED, None
