"""Records a run in the database, and its Optuna study beside it. A busy database is waited for; one that is gone ends the run."""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
import stat
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import optuna
import platformdirs
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.decoding import ConfigShape, Malformed, converted, reason
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem
from autotax.core.settings import ENDINGS, Settings
from autotax.db import DatabaseBusy, Store, TrialRecord, WinnerRecord, failing
from autotax.db.connection import ELSEWHERE, Unusable
from autotax.db.records import Place, holds, same_kernel
from autotax.db.shipped import known_precedents, winners_of
from autotax.db.url import identity, shown, sqlite_path
from autotax.digests import kernel_digest
from autotax.hardware import Hardware
from autotax.operators.registry import variant_digest
from autotax.runner.measurement import Candidate, Measurement
from autotax.software import Environment
from autotax.spaces import Space
from autotax.tuner.finalists import Decision
from autotax.tuner.progress import Listener

LONGEST_WAIT_S = 600.0
"""How long a database may stay locked beyond its own timeout before a run ends."""
PAUSE_S = 0.2
WAITING = "the database is kept locked by another process; waiting"

P = ParamSpec("P")
R = TypeVar("R")


class Patience:
    """Repeats a call while the database is busy, for LONGEST_WAIT_S at most. Reports the wait by `notice`."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function and returns its result. Its errors pass through; DatabaseBusy does so only after LONGEST_WAIT_S."""
        since = time.monotonic()
        while True:
            try:
                return function(*args, **kwargs)
            except DatabaseBusy:
                if time.monotonic() - since > LONGEST_WAIT_S:
                    raise
                self._notice(WAITING)
                time.sleep(PAUSE_S)


def measurement_of(record: TrialRecord) -> Measurement:
    """The measurement from which a stored trial was made."""
    return Measurement(
        candidate=Candidate(record.config, Conditions.from_dict(record.conditions)),
        status=record.status,
        error=record.error,
        samples=tuple(tuple(samples) for samples in record.samples or ()),
        compile_s=record.compile_s or 0.0,
        relative_error=record.relative_error,
        conditions=record.conditions,
    )


# The record of a run. Every trial, the winner and all notices go to the store as soon as they are known.

FINALISTS = "finalists"
"""The `stage` of a finalist's trial. Trials of the search have no `stage`."""


class Ledger:
    """One run in the store. A busy store is waited for. Any other failure of the store is a MachineError. Ranks that run other
    kernel sources than this process raise a MachineError too.
    """

    def __init__(
        self, store: Store, problem: Problem, hardware: Hardware, environment: Environment, settings: Settings, listener: Listener
    ) -> None:
        assert settings.conditions is not None
        if environment.kernels != (mine := kernel_digest()):
            raise MachineError(
                f"the kernel sources are {environment.kernels} to the ranks and {mine} to the tuner, so they have changed since "
                "it started: run the same command again"
            )
        self.store = store
        self.key = (problem, hardware, environment)
        self.conditions: Conditions = settings.conditions
        self.listener = listener
        self.notices: list[str] = []
        self.patience = Patience(self.notice)
        self._unsaved: list[str] = []
        self._stood: list[Config] = []
        self._store_marked_endings()
        self.run_id = self.patience(store.begin_run, problem, hardware, environment, settings.to_dict())

    def notice(self, text: str) -> None:
        """Passes a notice to the listener at once, and to the store with the next write. Each text is passed once."""
        if text not in self.notices:
            self.notices.append(text)
            self._unsaved.append(text)
            self.listener.notice(text)

    def add(self, number: int, measurement: Measurement, more: Mapping[str, object] | None = None) -> int:
        """Stores a trial and returns its id. `more` is stored with the conditions."""
        jobs = {"jobs": list(measurement.jobs)} if measurement.jobs else {}
        trial = TrialRecord(
            number=number,
            config=measurement.config,
            status=measurement.status,
            latency_us=measurement.latency_us,
            samples=[list(samples) for samples in measurement.samples] or None,
            slowest_rank=measurement.slowest_rank,
            compile_s=measurement.compile_s,
            verified=measurement.verified,
            relative_error=measurement.relative_error,
            error=measurement.error,
            conditions=measurement.candidate.conditions.to_dict() | measurement.conditions | jobs | dict(more or {}),
            kernel_digest=variant_digest(self.key[0].op, measurement.config.variant),
        )
        self._save_notices()
        return self.patience(self.store.add_trial, self.run_id, trial)

    def add_finalists(self, number: int, measured: Sequence[Measurement]) -> dict[Candidate, int]:
        """Stores the trials of the finalists and returns their ids."""
        return {m.candidate: self.add(number, m, {"stage": FINALISTS}) for m in measured}

    def withdraw(self, wrong: Measurement) -> None:
        """Deletes a stored winner of this problem whose result was found to be wrong."""
        for winner in self._crowned():
            if winner.config == wrong.config:
                self.patience(self.store.withdraw_winner, winner)
                self.notice(f"the stored winner {winner.config} is wrong and was withdrawn: {wrong.error}")

    def crown(self, decision: Decision, measured: Sequence[Measurement], ids: Mapping[Candidate, int]) -> None:
        """Stores the winner of the decision as the winner of this problem here."""
        problem, hardware, environment = self.key
        winner, baseline = decision.winner.measurement, decision.baseline
        assert winner.latency_us is not None and baseline.latency_us is not None
        record = WinnerRecord(
            problem=problem,
            hardware=hardware,
            environment=environment,
            conditions=self.conditions,
            trial_id=ids[winner.candidate],
            config=winner.config,
            latency_us=winner.latency_us,
            baseline_us=baseline.latency_us,
            baseline=baseline.config,
            speedup=decision.winner.speedup,
            interval_low=decision.winner.interval[0],
            interval_high=decision.winner.interval[1],
            tie=decision.tie,
            verified=winner.verified,
            samples={m.config.digest: [list(samples) for samples in m.samples] for m in measured},
            kernel_digest=variant_digest(self.key[0].op, winner.config.variant),
        )
        met = {measurement.config.digest for measurement in measured} | {config.digest for config in self._stood}
        if other := self.patience(self.store.set_winner, record, met):
            self.notice(f"another tuner has stored {other} meanwhile, which is better proven: it stays the winner")

    def end(self, status: str, accounts: Mapping[str, float]) -> None:
        self._save_notices()
        self.patience(self.store.end_run, self.run_id, status, accounts)

    def abandon(self, status: str, accounts: Mapping[str, float]) -> None:
        """Stores the end of a run that failed. There is only one attempt, and its failure must not hide the first error. If the
        database refuses, a marker file remains and the next run stores the end.
        """
        try:
            self.store.end_run(self.run_id, status, accounts)
        except MachineError:
            write_marker(self.store.url, self.run_id, status)

    def statuses(self) -> dict[int, str]:
        """The status of each run of this problem, by run id. A killed run still has the status `running`."""
        return {run.id: run.status for run in self.patience(self.store.runs, self.key[0])}

    def earlier(self, space: Space) -> list[Measurement]:
        """The latest search trial of each config of the space, from earlier runs on this machine. Only trials with the same
        software, variant sources and conditions count, and only those since the last run without resumption.
        """
        searched = [record for record in self._kept() if record.conditions.get("stage") != FINALISTS]
        latest = {record.config.digest: record for record in searched if record.config in space}
        return [measurement_of(record) for record in latest.values()]

    def failed_finalists(self) -> set[Config]:
        """Configs that passed the search of an earlier run and failed as finalists."""
        finalists = [record for record in self._kept() if record.conditions.get("stage") == FINALISTS]
        latest = {record.config: record for record in finalists}
        return {config for config, record in latest.items() if not record.verified}

    def precedents(self, space: Space) -> list[Config]:
        """Configs of the space that won this problem or similar ones, by this database and the shipped winners."""
        return self.patience(known_precedents, self.key[0], self._here, self.store, space.admit)

    def champions(self, space: Space) -> list[Candidate]:
        """The winners of exactly this problem here: the stored one, and the shipped ones of the space. They enter the finalist
        round of every run, even a short one. A winner that was proven back to back is proven again in place.
        """
        self._stood = list(dict.fromkeys(winner.config for winner in self._crowned()))
        shipped = filter(space.__contains__, winners_of(self.key[0], self._here))
        return [Candidate(config, self.conditions) for config in dict.fromkeys([*self._stood, *shipped])]

    @property
    def _here(self) -> Place:
        _, hardware, software = self.key
        return Place(hardware, software, self.conditions)

    def _crowned(self) -> list[WinnerRecord]:
        """The winners of the database that a look-up would find here."""
        winners, here = self.patience(self.store.winners, with_samples=False), self._here
        return [winner for winner in winners if winner.problem == self.key[0] and holds(winner, winner.place, here)]

    def _kept(self) -> list[TrialRecord]:
        problem, hardware, environment = self.key
        kept = self.patience(self.store.trials, problem, hardware, environment=environment)
        deployed = self.conditions.searched
        alike = [record for record in kept if Conditions.from_dict(record.conditions).searched == deployed]
        anew = max((r.run.id for r in alike if r.run and r.run.settings.get("resume") is False), default=0)
        since = [record for record in alike if (record.run_id or 0) >= anew]
        return [record for record in since if same_kernel(record)]

    def _store_marked_endings(self) -> None:
        """Stores the end of earlier runs that could not store it themselves."""
        for path, run_id, status in markers(self.store.url):
            if any(run.id == run_id and run.status == "running" for run in self.patience(self.store.runs)):
                self.patience(self.store.end_run, run_id, status)
            with suppress(OSError):  # another user's file in a sticky folder; its content stays true
                path.unlink()

    def _save_notices(self) -> None:
        while self._unsaved:
            self.patience(self.store.add_notice, self.run_id, self._unsaved[0])
            del self._unsaved[0]


# Marker files with the end of a run, for when the database cannot be written.

def write_marker(url: str, run_id: int, status: str) -> None:
    """Writes the end status of a run to a marker file. If a full disk refuses that too, the run counts as killed."""
    place = _place(url)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_name(f"{place.name}.run-{run_id}.{status}").touch()  # a full disk often has room for an empty file


def markers(url: str) -> list[tuple[Path, int, str]]:
    """The existing marker files, each with its run id and status."""
    place = _place(url)
    pattern = re.compile(re.escape(place.name) + rf"\.run-(\d+)\.({'|'.join(ENDINGS)})")
    matches = [(path, pattern.fullmatch(path.name)) for path in place.parent.glob("*.run-*.*")]
    return [(path, int(match[1]), match[2]) for path, match in matches if match and _is_own(path)]


def _is_own(path: Path) -> bool:
    """Whether a file is this user's. A stranger's in a shared folder would end a run that goes on."""
    with suppress(OSError):
        about = path.lstat()
        return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
    return False


def _place(url: str) -> Path:
    """Prefix of the marker files: beside a SQLite file, else in the user's data folder, where later runs look."""
    return sqlite_path(url) or platformdirs.user_data_path("autotax") / identity(url)


# Configs in flight. Each config is noted before it is measured, so that the next run knows which config may have killed the
# previous one.

class _Note(msgspec.Struct):
    """The process of a run, and the configs that it was measuring."""

    by: tuple[str, str, int]
    configs: list[ConfigShape]


DEADLY = 2
"""A config that was in flight when this many runs in a row were killed is assumed to kill them."""
NOTE = "in flight in run "
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Flight:
    """The notes of one study. `run_id` is the current run. `statuses` has the status of all runs by id: a killed run is still
    `running`, but its process is gone. `call` executes functions that use the database.
    """

    def __init__(self, study: optuna.Study, run_id: int, statuses: Mapping[int, str], call: Callable[..., Any]) -> None:
        self._study, self._run_id, self._call = study, run_id, call
        noted: dict[int, _Note] = call(lambda: _notes_of(study.user_attrs))
        done = max((run for run in noted if statuses.get(run) == "done"), default=0)
        cut = [noted[run] for run in noted if done < run < run_id and statuses.get(run) == "running"]
        in_flight = (shape.config for note in cut if not _may_go_on(note.by) for shape in note.configs)
        self.deaths = Counter(config for config in in_flight if config.variant != "bsp")
        """Consecutive killed runs during which a config was being measured. BSP is excluded: every decision needs it."""

    @property
    def deadly(self) -> list[Config]:
        return [config for config, deaths in self.deaths.items() if deaths >= DEADLY]

    def begin(self, configs: Sequence[Config]) -> None:
        """Notes the configs that are measured from now on; replaces the previous note."""
        note = {"by": this_process(), "configs": [config.to_dict() for config in configs]}
        self._call(self._study.set_user_attr, f"{NOTE}{self._run_id}", note)


def _notes_of(facts: Mapping[str, Any]) -> dict[int, _Note]:
    """The notes of a study, by run. Raises Malformed for one that was edited."""
    notes = {name: name.removeprefix(NOTE) for name in facts if name.startswith(NOTE)}
    if strange := [name for name, run in notes.items() if not run.isdecimal()]:
        raise Malformed(f"a note is named {strange[0][:40]!r}")
    return {int(run): converted(facts[name], _Note) for name, run in notes.items()}


def this_process() -> list[Any]:
    """Identifies this process: its host, the boot id of the host, its process id."""
    return [socket.gethostname(), BOOT.read_text().strip() if BOOT.exists() else "", os.getpid()]


def _may_go_on(by: Sequence[Any]) -> bool:
    """Whether the process of an earlier run may still be alive. Processes of other hosts count as alive."""
    (host, boot, number), (here, since, mine) = by, this_process()
    if host != here:
        return True
    if boot != since or number == mine:  # a process that begins another run has ended its earlier one
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        pass
    return True


# The Optuna study of one problem on one machine, stored next to the runs. Other tuners may use it at the same time, or be
# creating its tables.

BUSY_S = 30
"""Seconds that Optuna waits for a locked SQLite file before it raises."""
ATTEMPTS, TABLES_PAUSE_S = 10, 0.1
"""Attempts to create Optuna's tables while other processes create them, and the mean pause after a failed attempt."""
METRIC = "latency (us)"
ANEW = " since run "
STATUS = "status"
"""Attribute of Optuna's trials with the status of the measurement."""
VARIANT, SPEEDUP = "variant", "times faster than BSP"
"""Attributes of Optuna's trials for people. The speed-up is over the best BSP so far, measured at another time."""
FINISHED = TrialState.COMPLETE, TrialState.PRUNED
_GONE = "Record does not exist."  # Optuna's message for a missing study or trial


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
    """The Optuna trial for a measurement. Outcomes without a verified latency are pruned, which the sampler takes as bad."""
    params = Space.as_suggestion(measurement.config)
    space.suggest(spelled := optuna.trial.FixedTrial(params))
    value = measurement.score_us if measurement.verified else None
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
    study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
    if study.directions != [optuna.study.StudyDirection.MINIMIZE]:
        raise ValueError(f"study {name!r} does not minimize one value")
    with _experiments():
        if study.metric_names != [METRIC]:
            study.set_metric_names([METRIC])
    return study


def study_name(problem: Problem, hardware: Hardware, environment: Environment, conditions: Conditions, space: str) -> str:
    """The name of a problem's study, readable, with a digest of all facts that make trials comparable."""
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
    cause: BaseException | None = None
    for _ in range(ATTEMPTS):
        try:
            return RDBStorage(url, engine_kwargs={"connect_args": connect})
        except DBAPIError as error:
            cause = error.orig
            if not isinstance(error, IntegrityError | ProgrammingError) and "already exists" not in str(cause):
                raise
            time.sleep(random.uniform(0.5, 1.5) * TABLES_PAUSE_S)  # so that colliding processes do not collide again
    raise Unusable(f"does not take the tables of Optuna ({' '.join(str(cause).split())})", "mend it")
