"""THE STUDY of one problem on one machine, kept beside the runs. Other tuners may be at it too, or just make its tables."""

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
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.core.validation import reason
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
"""How long Optuna waits for a locked SQLite file before it complains."""
ATTEMPTS, PAUSE_S = 10, 0.1
"""At making Optuna's tables while others make them, and about how long after one that failed."""
METRIC = "latency (us)"
ANEW = " since run "
STATUS = "status"
"""Attribute of Optuna's trials: how the measurement ended."""
VARIANT, SPEEDUP = "variant", "times faster than BSP"
"""Attributes of Optuna's trials for people. The speed-up is over the best BSP so far, measured at another time."""
FINISHED = TrialState.COMPLETE, TrialState.PRUNED
_GONE = "Record does not exist."  # what Optuna says then

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def using(url: str) -> Iterator[None]:
    """Turns what fails in a study's part of the database into a MachineError, or a DatabaseBusy where waiting helps."""
    with failing(url):
        try:
            yield
        except KeyError as error:
            if error.args != (_GONE,):
                raise
            raise Unusable("has lost the study that is in use", "leave studies alone that are in use,") from error


@contextmanager
def readable(url: str) -> Iterator[None]:
    """The same; what Optuna cannot read of its own rows is bad input, for somebody has edited them, or another Optuna."""
    try:
        with using(url):
            yield
    except (UsageError, MachineError):
        raise
    except (LookupError, ValueError, TypeError, AssertionError, RuntimeError) as error:
        told = f"holds a study that Optuna cannot read ({type(error).__name__}: {reason(error)})"
        raise UsageError(f"database {shown(url)} {told}: mend or remove the study, or {ELSEWHERE}") from error


class Study:
    """The records of a study in the database, which dashboards show. They are written behind: a search never reads them, and
    writes while ranks measure.
    """

    def __init__(self, space: Space, ledger: Ledger, name: str, settings: Settings) -> None:
        self._space, self._url, self._patience = space, ledger.store.url, ledger.patience
        with readable(self._url):
            self.records: optuna.Study = self.call(open_study, self._url, name, ledger.run_id, settings)
        self._waiting: list[Measurement] = []
        self._baseline_us: float | None = None

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls something that uses the database, which may be busy."""
        def attempt() -> R:
            with using(self._url):
                return function(*args, **kwargs)

        return self._patience(attempt)

    def describe(self, about: Mapping[str, str]) -> None:
        """Notes facts of the study that people read beside it, for instance in optuna-dashboard."""
        with readable(self._url):
            known = self.call(lambda: self.records.user_attrs)
        for name, told in about.items():
            if known.get(name) != told:
                self.call(self.records.set_user_attr, name, told)

    def keep(self, known: Sequence[Measurement]) -> None:
        """Writes what the records lack: trials from before an edit of other variants, or of another choice of them, and what a
        run that was killed could not write.
        """
        if known:
            with readable(self._url):
                there = [trial.params for trial in self.call(self.records.get_trials, deepcopy=False, states=FINISHED)]
            self._waiting += [each for each in known if Space.as_suggestion(each.config) not in there]
            self.save()

    def queue(self, measurement: Measurement) -> None:
        """Takes what `save` is to write."""
        self._waiting.append(measurement)

    def save(self) -> None:
        """Writes what is waiting, one by one."""
        while self._waiting:
            self.call(self._write, self._waiting[0])
            del self._waiting[0]

    def give_up(self) -> None:
        """Writes what is waiting if the database takes it at once; else the next run writes it."""
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
    """The trial that stands for a measurement: only verified latencies are values; every other outcome is pruned, hence bad."""
    params = Space.as_suggestion(measurement.config)
    space.suggest(spelled := optuna.trial.FixedTrial(params))
    value = score_us(measurement) if measurement.verified else None
    state = TrialState.PRUNED if value is None else TrialState.COMPLETE
    return optuna.trial.create_trial(
        state=state, value=value, params=params, distributions=spelled.distributions, user_attrs=dict(attributes or {})
    )


def open_study(url: str, name: str, run_id: int, settings: Settings) -> optuna.Study:
    """The study of this name. A run that begins anew takes another one, for somebody may be at that; later runs follow it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = _storage(url)
    if not settings.resume:
        name += f"{ANEW}{run_id}"
    elif anew := [each.study_name for each in storage.get_all_studies() if each.study_name.startswith(name + ANEW)]:
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
    """Names the study of one problem for people, and by a digest of all that must be the same for its trials to compare."""
    key = f"{problem.key} on {hardware.digest} with {environment.digest} in {space} as {conditions.key}"
    place = f"{problem.world_size} x {hardware.device}" if hardware.on_gpu else f"{problem.world_size} CPU ranks"
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return f"{problem.op} {problem.brief()} | {place} | {conditions.key} | triton {environment.triton} | {digest}"


def sampler_for(name: str, seed: int) -> BaseSampler:
    """Optuna's sampler; with `gp` it is not asked."""
    if name != "tpe":
        return optuna.samplers.RandomSampler(seed=seed)
    # group: parameters of different variants are modelled apart; multivariate: those of one variant together.
    with _experiments():
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=12)


@contextmanager
def _experiments() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _storage(url: str) -> RDBStorage:
    """Optuna's tables, made if they are not there. It makes them one by one, and fails where another process was faster."""
    connect = {"timeout": BUSY_S} if url.startswith("sqlite") else {}
    said: BaseException | None = None
    for _ in range(ATTEMPTS):
        try:
            return RDBStorage(url, engine_kwargs={"connect_args": connect})
        except DBAPIError as error:
            said = error.orig
            if not isinstance(error, IntegrityError | ProgrammingError) and "already exists" not in str(said):
                raise
            time.sleep(random.uniform(0.5, 1.5) * PAUSE_S)  # so that those who met here do not meet again
    raise Unusable(f"does not take the tables of Optuna ({' '.join(str(said).split())})", "mend it")
