"""Landscapes: all recorded trials of a host in one compact file, without the samples. The format is a superset of T4, the results
format of the auto-tuning community. Replays and models of latencies use these files.

The file is JSON compressed by gzip. Its `results` have the fields of T4 and further ones. `runs` and `conditions` are stored
once; results refer to them by their index. `t4` gives one problem as a plain T4 document.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.decoding import LONGEST_NAME, Malformed, Sample, converted, from_json
from autotax.core.errors import UsageError, summary
from autotax.core.files import read_bytes, write_whole
from autotax.core.problem import Problem
from autotax.core.settings import INVALIDITY
from autotax.db.formats import EnvironmentShape, HardwareShape
from autotax.db.records import RunRecord, TrialRecord
from autotax.db.store import Store
from autotax.operators.problem_files import problem_of
from autotax.tuner.run_recorder import FINALISTS

FORMAT, VERSION = "autotax landscapes", 1
T4 = "1.0.0"
LONGEST_ERROR = 120
"""Characters."""


class Times(msgspec.Struct, forbid_unknown_fields=True):
    """Times in milliseconds. T4 stores the samples in `runtimes`; here `spread` of the result summarises them."""

    compilation: float = 0.0
    runtimes: list[float] = []


class Value(msgspec.Struct, forbid_unknown_fields=True):
    value: Sample | None
    name: str = "time"
    unit: Literal["us"] = "us"


class Result(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One trial. The first fields are those of T4."""

    timestamp: str
    configuration: dict[str, int | str]
    """`variant`, and the parameters that the variant has."""
    times: Times
    invalidity: str
    correctness: Literal[0, 1]
    measurements: list[Value]
    objectives: list[str]
    run: int
    conditions: int
    number: int
    status: str
    kernel_digest: str
    final: bool = False
    """Measured in a finalist round, interleaved with bulk-synchronous: figures of one round may be compared as pairs."""
    spread: tuple[int, float, float] | None = None
    """Samples, and the first and the third quartile of the maximum over ranks, in microseconds."""
    slowest_rank: int | None = None
    relative_error: float | None = None
    error: str | None = None
    """Shortened to LONGEST_ERROR."""

    @property
    def config(self) -> Config:
        values = dict(self.configuration)
        return Config.of(str(values.pop("variant")), values)

    @property
    def latency_us(self) -> float | None:
        return self.measurements[0].value if self.measurements else None


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """A run of the tuner, with its database and its id there."""

    database: str
    id: int
    problem: str
    hardware: str
    environment: str
    settings: dict[str, Any]
    status: str
    started_at: str
    ended_at: str | None
    notices: list[str]
    accounts: dict[str, float]

    @property
    def imported(self) -> bool:
        """Whether its one trial was measured elsewhere and came with a winner."""
        return "imported_from" in self.settings


class Landscapes(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a file. Problems are identified by their keys, hardware and environments by their digests."""

    format: Literal["autotax landscapes"]
    version: Literal[1]
    schema_version: str
    metadata: dict[str, str]
    problems: dict[str, dict[str, Any]]
    hardware: dict[str, dict[str, int | str]]
    environments: dict[str, dict[str, str]]
    conditions: list[dict[str, Any]]
    runs: list[Run]
    results: list[Result]

    def problem(self, key: str) -> Problem:
        return problem_of(self.problems[key])

    def measured(self) -> list[str]:
        """The keys of problems with a run that was not imported."""
        own = {run.problem for run in self.runs if not run.imported}
        return [key for key in self.problems if key in own]

    def of_runs(self) -> Iterator[tuple[Run, Result]]:
        """All trials in their order, each with its run."""
        return ((self.runs[result.run], result) for result in self.results)

    def t4(self, key: str) -> dict[str, Any]:
        """The searched trials of a problem as T4 has them, times in milliseconds; parameters that a variant lacks are "none"."""
        trials = [r for run, r in self.of_runs() if run.problem == key and not r.final and not run.imported]
        names = sorted({name for result in trials for name in result.configuration} - {"variant"})
        results = [
            {
                "timestamp": r.timestamp,
                "configuration": {
                    "variant": r.configuration["variant"],
                    **{name: r.configuration.get(name, "none") for name in names},
                },
                "times": msgspec.to_builtins(r.times) | dict.fromkeys(("framework", "search_algorithm", "validation"), 0),
                "invalidity": r.invalidity,
                "correctness": r.correctness,
                "measurements": [{"name": "time", "value": (r.latency_us or 0.0) / 1e3, "unit": "ms"}],
                "objectives": r.objectives,
            }
            for r in trials
        ]
        return {"schema_version": T4, "metadata": {"timeunit": "milliseconds"}, "results": results}


def write(path: Path, databases: Iterable[Path], root: Path, kept: Landscapes | None = None) -> Landscapes:
    """Exports databases to one file, after the entries of `kept`. Runs name their database by its path below `root`, or else by
    its file name.

    Raises UsageError for a database whose name occurs in `kept`.
    """
    new = Landscapes(FORMAT, VERSION, T4, {"timeunit": "milliseconds"}, {}, {}, {}, [], [], [])  # type: ignore[arg-type]
    landscapes = kept or new
    places = {json.dumps(conditions, sort_keys=True): place for place, conditions in enumerate(landscapes.conditions)}
    there = {run.database for run in landscapes.runs}
    for database in databases:
        if (name := _name(database, root)) in there:
            raise UsageError(f"database is {name}; runs of that name are kept already: rename the file")
        with Store.open(database, create=False) as store:
            _add(landscapes, places, store.runs(), store.trials(), name)
    data = msgspec.json.encode(landscapes)
    write_whole(path, gzip.compress(data, 9, mtime=0))
    return landscapes


def read(path: Path) -> Landscapes:
    """Reads a file. Raises UsageError, of one line, if any part of it is invalid."""
    try:
        landscapes = from_json(read_bytes(path), Landscapes)
        _check(landscapes)
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give another") from None
    except (Malformed, UsageError) as error:
        raise UsageError(f"file {path} holds no landscapes of autotax ({str(error)[:300]}): give another") from None
    return landscapes


def _name(database: Path, root: Path) -> str:
    return str(database.relative_to(root)) if database.is_relative_to(root) else database.name


def _check(file: Landscapes) -> None:
    """Checks that all references within the file are valid, and that its parts are what the tuner makes of them."""
    for key in file.problems:
        if file.problem(key).key != key:
            raise Malformed(f"{key[:LONGEST_NAME]!r} is not the key of its problem")
    for hardware in file.hardware.values():
        converted(hardware, HardwareShape)
    for environment in file.environments.values():
        converted(environment, EnvironmentShape)
    for conditions in file.conditions:
        Conditions(**msgspec.structs.asdict(converted(conditions, _Deployed)))
    for run in file.runs:
        if not (run.problem in file.problems and run.hardware in file.hardware and run.environment in file.environments):
            raise Malformed(f"run {run.id} of {run.database[:LONGEST_NAME]!r} names what is not in the file")
    for number, result in enumerate(file.results, 1):
        if not (0 <= result.run < len(file.runs) and 0 <= result.conditions < len(file.conditions)):
            raise Malformed(f"result {number} points beyond the file")
        if "variant" not in result.configuration:
            raise Malformed(f"result {number} has no variant")


class _Deployed(msgspec.Struct):
    """The conditions of a measurement, among whatever else is noted of it."""

    mode: str = "graph"
    l2: str = "cold"
    skew_us: float = 0.0


def _add(
    landscapes: Landscapes, places: dict[str, int], runs: Iterable[RunRecord], trials: Iterable[TrialRecord], database: str
) -> None:
    at: dict[int, int] = {}
    for run in runs:
        at[run.id] = len(landscapes.runs)
        landscapes.problems[run.problem.key] = run.problem.to_dict()
        landscapes.hardware[run.hardware.digest] = run.hardware.to_dict()
        landscapes.environments[run.environment.digest] = asdict(run.environment)
        landscapes.runs.append(_run(run, database))
    for trial in trials:
        assert trial.run_id is not None
        conditions = {name: value for name, value in trial.conditions.items() if name != "stage"}
        place = places.setdefault(json.dumps(conditions, sort_keys=True), len(places))
        if place == len(landscapes.conditions):
            landscapes.conditions.append(conditions)
        landscapes.results.append(_result(trial, at[trial.run_id], place))


def _run(run: RunRecord, database: str) -> Run:
    return Run(
        database=database,
        id=run.id,
        problem=run.problem.key,
        hardware=run.hardware.digest,
        environment=run.environment.digest,
        settings=run.settings,
        status=run.status,
        started_at=run.started_at.isoformat(timespec="seconds"),
        ended_at=run.ended_at.isoformat(timespec="seconds") if run.ended_at else None,
        notices=list(run.notices),
        accounts={name: round(value, 3) for name, value in run.accounts.items()},
    )


def _result(trial: TrialRecord, run: int, conditions: int) -> Result:
    assert trial.created_at is not None
    error = trial.error and summary(trial.error)[:LONGEST_ERROR]
    rounds = [max(samples) for samples in zip(*trial.samples or [], strict=True)]
    low, _, high = statistics.quantiles(rounds, method="inclusive") if len(rounds) > 1 else (0.0, 0.0, 0.0)
    return Result(
        timestamp=trial.created_at.isoformat(timespec="seconds"),
        configuration={"variant": trial.config.variant, **trial.config.values},
        times=Times(round((trial.compile_s or 0.0) * 1e3)),
        invalidity=INVALIDITY[trial.status],
        correctness=1 if trial.verified else 0,
        measurements=[Value(trial.latency_us)],
        objectives=["time"],
        run=run,
        conditions=conditions,
        number=trial.number,
        status=trial.status,
        kernel_digest=trial.kernel_digest or "",
        final=trial.conditions.get("stage") == FINALISTS,
        spread=(len(rounds), round(low, 2), round(high, 2)) if len(rounds) > 1 else None,
        slowest_rank=trial.slowest_rank,
        relative_error=float(f"{trial.relative_error:.2g}") if trial.relative_error is not None else None,
        error=error or None,
    )
