"""Commands run in this process. Tuner and ranks are stand-ins that answer at once and remember what they were asked."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from autotax.cli import app, options
from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.core.errors import MachineError
from autotax.core.problem import Problem
from autotax.db import Store, TrialRecord, WinnerRecord, resolve_url
from autotax.db.lookup import reload
from autotax.hardware import Hardware, detect
from autotax.operators import operators
from autotax.operators.registry import variant_digest
from autotax.runner import Candidate, Measurement
from autotax.software import Environment, environment
from autotax.tuner import Comparison, Progress, Row, Settings, Standing, Verdict
from autotax.tuner.comparison import Choice
from autotax.tuner.progress import FailedVariant

GPUS = Hardware(
    backend="cuda",
    device="NVIDIA H200",
    target="cuda:90",
    count=4,
    memory_gib=139,
    processors=132,
    shared_memory=232448,
    l2_bytes=60 * 2**20,
    links="peer access 12/12 pairs",
)
REAL_DETECT = detect.__wrapped__
"""`detect` without its cache, which holds the real machine."""
BSP = Config.of("bsp")
PUSH = Config.of("push", block_m=64, comm=16)
HANG = "no answer within 60 s from rank 1 at 'run'\nand a second line"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def whole(self) -> Any:
        """The document, which has the same keys for every command."""
        answer = json.loads(self.out)
        assert list(answer) == ["schema_version", "command", "ok", "about", "results", "error"] and answer["schema_version"] == 1
        assert answer["ok"] == (self.code == 0), self
        return answer

    @property
    def results(self) -> Any:
        """The list of results in the JSON document."""
        assert self.whole["error"] is None
        return self.whole["results"]

    @property
    def document(self) -> Any:
        """The one result of a document."""
        [one] = self.results
        return one

    @property
    def complaint(self) -> str:
        """The single error line for bad input, on stderr and also in the document with `--json`."""
        assert self.code == 2, self
        assert self.err.startswith("autotax: ") and self.err.endswith("\n") and self.err.count("\n") == 1, self.err
        if self.out:
            error = self.whole["error"]
            assert error["code"] == 2 and " ".join(error["message"].split()) == self.err.removeprefix("autotax: ").rstrip("\n")
        return self.err


Run = Callable[..., Result]

_COMMANDS: dict[object, tuple[typer.Typer, object]] = {}
_make, _get_command = app.make, typer.main.get_command


def make_once(arguments: Sequence[str], *of: Any) -> typer.Typer:
    """Like `app.make`, which takes longer than most commands do; what it makes depends on the operator that is named."""
    known = tuple(operators().values())
    key = options.operator_named(arguments), tuple(map(id, known)), *map(id, of)
    if key not in _COMMANDS:
        _COMMANDS[key] = _make(arguments, *of), (known, of)  # an object that is kept shares its id with no other
    return _COMMANDS[key][0]


get_command_once = functools.cache(_get_command)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The path of the database for the commands of a test. It does not exist yet."""
    return tmp_path / "folder" / "autotax.db"


@pytest.fixture
def run(db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """run("tune", "--trials", 3): the exit code and what was printed. The machine has no GPUs."""
    monkeypatch.setenv("AUTOTAX_DB", str(db))
    monkeypatch.setattr(app, "make", make_once)
    monkeypatch.setattr(typer.main, "get_command", get_command_once)
    on_machine(monkeypatch, None)

    def call(*arguments: object) -> Result:
        reload()
        code = app.main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    yield call
    reload()


def on_machine(monkeypatch: pytest.MonkeyPatch, hardware: Hardware | None) -> None:
    """Makes this machine one with `hardware`, or without any GPU."""
    monkeypatch.setattr("autotax.hardware.backends_present", lambda: ["cpu"])
    monkeypatch.setattr("autotax.hardware.detect", lambda backend=None: hardware or REAL_DETECT(backend))


@dataclass
class Ranks:
    """Stands in for LiveRunner; `started` are the world sizes, in order."""

    started: list[int] = field(default_factory=list)
    start_s: float = 0
    """Seconds that a start takes."""
    closed: int = 0
    expected: list[Problem] = field(default_factory=list)
    ahead: list[Problem] = field(default_factory=list)
    """Problems whose kernels compilers began with before the ranks were ready."""
    foresight: int = 8

    def __call__(self, hardware: Hardware, world_size: int, seed: int = 0) -> Ranks:
        self.hardware, self.world_size = hardware, world_size
        return self

    @property
    def environment(self) -> Environment:
        return self.start()

    def start(self, overlap: Callable[[], None] | None = None) -> Environment:
        if self.world_size not in self.started:
            self.started.append(self.world_size)
            if overlap:
                overlap()
                self.ahead = list(self.expected)
            time.sleep(self.start_s)
        return environment("cpu")

    def expect(self, problem: Problem, configs: Sequence[Config], later: Sequence[Config] = ()) -> int:
        self.expected.append(problem)
        return 0

    def close(self) -> None:
        self.closed += 1


@dataclass
class Tuner:
    """Stands in for the tuner; `how` makes it find a winner, a tie or nothing, or be interrupted."""

    how: str = "wins"
    asked: list[tuple[Problem, Settings]] = field(default_factory=list)
    proven: list[tuple[Problem, tuple[Config, ...], Settings]] = field(default_factory=list)
    compared: list[tuple[Problem, Config, Config]] = field(default_factory=list)
    spent_s: list[float] = field(default_factory=list)
    """The seconds of each problem's limit that were over when its search began."""
    conditions: list[Conditions] = field(default_factory=list)
    """The conditions of each comparison."""
    choices: dict[str, Choice] = field(default_factory=dict)
    """The config that represented each variant in the last comparison."""
    failed: tuple[FailedVariant, ...] = ()
    broken: list[Problem] = field(default_factory=list)
    """Problems at which a comparison fails as a whole."""

    def tune(
        self,
        problem: Problem,
        *,
        hardware: Hardware,
        runner: Ranks,
        store: Store,
        environment: Environment,
        settings: Settings,
        listener: Any,
        overlap: Any = None,
        began: float | None = None,
    ) -> Verdict:
        assert runner.hardware == hardware
        self.asked.append((problem, settings))
        self.spent_s.append(0 if began is None else time.monotonic() - began)
        keep_run(store, problem, hardware, environment)
        push, bsp = measured(PUSH, 80.0), measured(BSP, 100.0)
        listener.notice("rank 1 is slow")
        listener.progress(Progress(problem, 1, settings.trials, {"ok": 1}, bsp, bsp, 100.0, 1.0, None))
        verdict = Verdict(
            problem=problem,
            hardware=hardware,
            environment=environment,
            winner=Standing(push, 1.25, (1.2, 1.3)),
            baseline=bsp,
            tie=False,
            standings=(Standing(push, 1.25, (1.2, 1.3)), Standing(bsp, 1.0, (1.0, 1.0))),
            trials={"ok": 2, "hang": 1},
            seconds=12.3456,
            conditions=settings.conditions or ON_CPU,
            notices=("rank 1 is slow",),
            failed=self.failed,
        )
        if self.how == "ties":
            return replace(verdict, winner=verdict.standings[1], tie=True)
        if self.how == "wins":
            return verdict
        nothing = replace(verdict, winner=None, baseline=None, standings=())
        trials = {} if self.how == "late at once" else nothing.trials
        return replace(nothing, interrupted=self.how == "interrupted", late=self.how.startswith("late"), trials=trials)

    def prove(
        self, problem: Problem, configs: Sequence[Config], *, hardware: Hardware, runner: Ranks, store: Store,
        environment: Environment, settings: Settings, listener: Any, limit: Any = None,
    ) -> Verdict:  # fmt: skip
        self.proven.append((problem, tuple(configs), settings))
        known = {"hardware": hardware, "runner": runner, "store": store, "environment": environment, "listener": listener}
        verdict = self.tune(problem, settings=settings, **known)
        former = measured(configs[-1], 80.0)
        if self.how != "wins":
            return verdict
        return replace(verdict, winner=Standing(former, 1.25, (1.2, 1.3)))

    def compare(
        self, problem: Problem, *, hardware: Hardware, runner: Ranks, tuned: Choice, baseline: Choice,
        variants: Sequence[Choice] = (), conditions: Conditions, limit: Any = None,
    ) -> Comparison:  # fmt: skip
        config = tuned.config
        assert type(config) is Config and runner.hardware == hardware and runner.environment
        self.compared.append((problem, config, baseline.config))
        self.conditions.append(conditions)
        self.choices = {choice.config.variant: choice for choice in variants}
        if problem in self.broken:
            raise MachineError("the ranks do not start again")
        rows = [
            Row("autotax", config.variant, measured(config, 80.0), 1.25, tuned.source),
            Row("bsp-eager", "bsp", measured(baseline.config, 100.0), 1.0, baseline.source),
            Row("torch-eager", "torch", failed(Config.of("torch")), None),
        ]
        if self.how == "nothing":
            rows = [Row("autotax", "push", failed(PUSH), None)]
        return Comparison(problem, hardware, conditions, tuple(rows))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    stand_in = Ranks()
    monkeypatch.setattr("autotax.runner.LiveRunner", stand_in)
    return stand_in


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tuner:
    request.getfixturevalue("ranks")
    stand_in = Tuner()
    monkeypatch.setattr("autotax.tuner.tune", stand_in.tune)
    monkeypatch.setattr("autotax.tuner.compare", stand_in.compare)
    monkeypatch.setattr("autotax.tuner.prove", stand_in.prove)
    return stand_in


def measured(config: Config, us: float) -> Measurement:
    return Measurement(Candidate(config, ON_CPU), "ok", samples=((us, us), (us - 1, us - 1)), relative_error=1e-6)


def failed(config: Config) -> Measurement:
    return Measurement(Candidate(config, ON_CPU), "hang", HANG)


def keep_run(store: Store, problem: Problem, hardware: Hardware, environment: Environment) -> int:
    """Stores a run of two trials, of which the second failed. Returns the id of the first trial."""
    run_id = store.begin_run(problem, hardware, environment, {})
    good = TrialRecord(0, PUSH, "ok", 80.0, [[80.0], [79.0]], verified=True, relative_error=1e-6)
    trial_id = store.add_trial(run_id, good)
    store.add_trial(run_id, TrialRecord(1, BSP, "wrong_result", error=HANG, relative_error=float("nan")))
    store.end_run(run_id, "done")
    return trial_id


def keep_winner(
    db: Path, problem: Problem, hardware: Hardware, config: Config, baseline: Config, conditions: Conditions = ON_CPU,
    triton: str | None = None,
) -> None:  # fmt: skip
    software = replace(environment("cpu"), triton=triton or environment("cpu").triton)
    with Store.open(resolve_url(str(db))) as store:
        run_id = store.begin_run(problem, hardware, software, {})
        trial = TrialRecord(0, config, "ok", 80.0, [[80.0]], verified=True, conditions=conditions.to_dict())
        trial_id = store.add_trial(run_id, trial)
        store.set_winner(
            WinnerRecord(
                problem=problem,
                hardware=hardware,
                environment=software,
                conditions=conditions,
                trial_id=trial_id,
                config=config,
                latency_us=80.0,
                baseline_us=100.0,
                baseline=baseline,
                speedup=1.25,
                interval_low=1.2,
                interval_high=1.3,
                tie=False,
                verified=True,
                kernel_digest=variant_digest(problem.op, config.variant),
            )
        )
