"""THE STUDY of one problem on one machine, kept beside the runs. Other tuners may be at it too, or just make its tables."""

from __future__ import annotations

import hashlib
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db import failing
from autotax.db.trouble import Unusable
from autotax.hardware import Environment, Hardware
from autotax.problem import Problem
from autotax.settings import Settings
from autotax.spaces import Space

BUSY_S = 30
"""How long Optuna waits for a locked SQLite file before it complains."""
ATTEMPTS, PAUSE_S = 10, 0.1
"""At making Optuna's tables while others make them, and about how long after one that failed."""
METRIC = "latency (us)"
ANEW = " since run "
_GONE = "Record does not exist."  # what Optuna says then


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


def open_study(url: str, name: str, run_id: int, settings: Settings) -> optuna.Study:
    """The study of this name. A run that begins anew takes another one, for somebody may be at that; later runs follow it."""
    storage = _storage(url)
    if not settings.resume:
        name += f"{ANEW}{run_id}"
    elif anew := [each.study_name for each in storage.get_all_studies() if each.study_name.startswith(name + ANEW)]:
        name = anew[-1]
    study = optuna.create_study(
        storage=storage, study_name=name, sampler=sampler_for(settings), direction="minimize", load_if_exists=True
    )
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


def sampler_for(settings: Settings) -> BaseSampler:
    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed=settings.seed)
    if settings.sampler == "gp":
        return optuna.samplers.GPSampler(seed=settings.seed)
    # group: parameters of different variants are modelled apart; multivariate: those of one variant together.
    with _experiments():
        return optuna.samplers.TPESampler(seed=settings.seed, multivariate=True, group=True, n_startup_trials=12)


def sampler_of(config: Config) -> BaseSampler:
    """Samples this config. The study's own queue would not do: other tuners take from it, and it outlives the run."""
    with _experiments():
        return optuna.samplers.PartialFixedSampler(Space.as_suggestion(config), optuna.samplers.RandomSampler())


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
