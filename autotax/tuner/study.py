"""The Optuna study of one problem on one machine, stored next to the runs. Other tuners may use it at the same time, or be
creating its tables.
"""

from __future__ import annotations

import hashlib
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from autotax.core.conditions import Conditions
from autotax.core.errors import MachineError, UsageError
from autotax.core.files import reason
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.db import failing
from autotax.db.errors import ELSEWHERE, Unusable
from autotax.db.url import shown
from autotax.hardware import Hardware
from autotax.runner.measurement import Measurement
from autotax.software import Environment
from autotax.spaces import Space
from autotax.tuner.run_recorder import Ledger
from autotax.tuner.statistics import score_us

BUSY_S = 30
"""Seconds that Optuna waits for a locked SQLite file before it raises."""
ATTEMPTS, PAUSE_S = 10, 0.1
"""Attempts to create Optuna's tables while other processes create them, and the mean pause after a failed attempt."""
METRIC = "latency (us)"
ANEW = " since run "
STATUS = "status"
"""Attribute of Optuna's trials with the status of the measurement."""
VARIANT, SPEEDUP = "variant", "times faster than BSP"
"""Attributes of Optuna's trials for people. The speed-up is over the best BSP so far, measured at another time."""
FINISHED = TrialState.COMPLETE, TrialState.PRUNED
_GONE = "Record does not exist."  # Optuna's message for a missing study or trial

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def using(url: str) -> Iterator[None]:
    """Turns errors of the study's tables into a MachineError, or into a DatabaseBusy if waiting helps."""
    with failing(url):
        try:
            yield
        except KeyError as error:
            if error.args != (_GONE,):
                raise
            raise Unusable("has lost the study that is in use", "leave studies alone that are in use,") from error


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Like `using`. Rows that Optuna cannot read are bad input: they were edited, or written by another version of Optuna."""
    try:
        with using(url):
            yield
    except (UsageError, MachineError):
        raise
    except (LookupError, ValueError, TypeError, AssertionError, RuntimeError) as error:
        message = f"holds a study that Optuna cannot read ({type(error).__name__}: {reason(error)})"
        raise UsageError(f"database {shown(url)} {message}: mend or remove the study, or {ELSEWHERE}") from error


class Study:
    """The records of a study in the database, which dashboards show. Writes are delayed: the search never reads the records, and
    writes them while the ranks measure.
    """

    def __init__(self, space: Space, ledger: Ledger, name: str, settings: Settings) -> None:
        self._space, self._url, self._patience = space, ledger.store.url, ledger.patience
        with readable(self._url):
            self.records: optuna.Study = self.call(open_study, self._url, name, ledger.run_id, settings)
        self._waiting: list[Measurement] = []
        self._baseline_us: float | None = None

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function that uses the database, and waits if the database is busy."""
        def attempt() -> R:
            with using(self._url):
                return function(*args, **kwargs)

        return self._patience(attempt)

    def describe(self, about: Mapping[str, str]) -> None:
        """Stores facts about the study for people, shown for instance in optuna-dashboard."""
        with readable(self._url):
            stored = self.call(lambda: self.records.user_attrs)
        for name, fact in about.items():
            if stored.get(name) != fact:
                self.call(self.records.set_user_attr, name, fact)

    def keep(self, measured: Sequence[Measurement]) -> None:
        """Writes missing records. These are trials from before other variants changed, trials of runs with another choice of
        variants, and trials that a killed run could not write.
        """
        if measured:
            with readable(self._url):
                written = [trial.params for trial in self.call(self.records.get_trials, deepcopy=False, states=FINISHED)]
            self._waiting += [measurement for measurement in measured if Space.as_suggestion(measurement.config) not in written]
            self.save()

    def queue(self, measurement: Measurement) -> None:
        """Queues a measurement for `save`."""
        self._waiting.append(measurement)

    def save(self) -> None:
        """Writes the queued measurements one by one."""
        while self._waiting:
            self.call(self._write, self._waiting[0])
            del self._waiting[0]

    def give_up(self) -> None:
        """Writes the queued measurements if the database accepts them at once; else the next run writes them."""
        with suppress(MachineError), using(self._url):
            for measurement in self._waiting:
                self._write(measurement)
        self._waiting.clear()

    def _write(self, measurement: Measurement) -> None:
        us = measurement.latency_us if measurement.verified else None
        if us and measurement.config.variant == "bsp":
            self._baseline_us = min(us, self._baseline_us or us)
        attributes: dict[str, str | float] = {STATUS: measurement.status, VARIANT: measurement.config.variant}
        if us and self._baseline_us:
            attributes[SPEEDUP] = round(self._baseline_us / us, 3)
        self.records.add_trial(finished(self._space, measurement, attributes))


def finished(
    space: Space, measurement: Measurement, attributes: Mapping[str, str | float] | None = None
) -> optuna.trial.FrozenTrial:
    """The Optuna trial for a measurement. Only verified latencies are values; every other outcome is pruned, which the sampler
    treats as bad.
    """
    params = Space.as_suggestion(measurement.config)
    space.suggest(spelled := optuna.trial.FixedTrial(params))
    value = score_us(measurement) if measurement.verified else None
    state = TrialState.PRUNED if value is None else TrialState.COMPLETE
    return optuna.trial.create_trial(
        state=state, value=value, params=params, distributions=spelled.distributions, user_attrs=dict(attributes or {})
    )


def open_study(url: str, name: str, run_id: int, settings: Settings) -> optuna.Study:
    """The study of this name. A run without resumption creates a new study, because another tuner may be using the old one. Later
    runs use the newest study.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = _storage(url)
    if not settings.resume:
        name += f"{ANEW}{run_id}"
    elif anew := [summary.study_name for summary in storage.get_all_studies() if summary.study_name.startswith(name + ANEW)]:
        name = anew[-1]
    study = optuna.create_study(
        storage=storage, study_name=name, direction="minimize", load_if_exists=True
    )
    if study.directions != [optuna.study.StudyDirection.MINIMIZE]:
        raise ValueError(f"study {name!r} does not minimize one value")
    with _experiments():
        if study.metric_names != [METRIC]:
            study.set_metric_names([METRIC])
    return study


def study_name(problem: Problem, hardware: Hardware, environment: Environment, conditions: Conditions, space: str) -> str:
    """The name of a problem's study. It is readable, and ends with a digest of all facts that must be equal for trials to be
    comparable.
    """
    key = f"{problem.key} on {hardware.digest} with {environment.digest} in {space} as {conditions.key}"
    place = f"{problem.world_size} x {hardware.device}" if hardware.on_gpu else f"{problem.world_size} CPU ranks"
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return f"{problem.op} {problem.brief()} | {place} | {conditions.key} | triton {environment.triton} | {digest}"


def sampler_for(name: str, seed: int) -> BaseSampler:
    """Optuna's sampler. With `gp` it is never asked."""
    if name != "tpe":
        return optuna.samplers.RandomSampler(seed=seed)
    # group: parameters of different variants are modelled separately; multivariate: parameters of one variant are modelled
    # jointly.
    with _experiments():
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=12)


@contextmanager
def _experiments() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _storage(url: str) -> RDBStorage:
    """Optuna's tables, created if they are missing. Optuna creates them one by one, and fails if another process is faster."""
    connect = {"timeout": BUSY_S} if url.startswith("sqlite") else {}
    said: BaseException | None = None
    for _ in range(ATTEMPTS):
        try:
            return RDBStorage(url, engine_kwargs={"connect_args": connect})
        except DBAPIError as error:
            said = error.orig
            if not isinstance(error, IntegrityError | ProgrammingError) and "already exists" not in str(said):
                raise
            time.sleep(random.uniform(0.5, 1.5) * PAUSE_S)  # so that colliding processes do not collide again
    raise Unusable(f"does not take the tables of Optuna ({' '.join(str(said).split())})", "mend it")
