"""A user's whole workflow on CPU ranks: commands in separate processes, real ranks, a real database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotax.core.conditions import ON_CPU
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.db.lookup import lookup
from autotax.hardware import detect
from autotax.heap import World, open_heap
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.operators import problem_from_dict
from autotax.operators.problems import AllGatherGemm
from autotax.operators.verification import make_inputs, reference, relative_error
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.runner.processes import SHARED
from autotax.runner.ranks import run_ranks
from autotax.spaces import Space, VariantSpace
from autotax.tuner import Settings, tune
from results.search.replay_runner import ReplayRunner

GEMM = ["all-gather-gemm", "--m", "16", "--n", "20", "--k", "32", "--dtype", "fp32"]
DECODE = [
    "flash-decode", "--batch", "1", "--q-heads", "2", "--kv-heads", "1", "--head-dim", "16", "--kv-len", "33", "--dtype", "fp32",
]  # fmt: skip


MARK = "AUTOTAX_END_TO_END"
"""Environment variable that all processes of a test inherit; it identifies leftovers."""


def ranks_of(test: str) -> list[psutil.Process]:
    """The rank processes of a test that still run, whatever their parent is now."""
    ranks = [p for p in psutil.process_iter(["name", "environ"]) if p.info["name"] == "autotax-rank"]
    return [rank for rank in ranks if (rank.info["environ"] or {}).get(MARK) == test]


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database of its own; whatever the test does, it leaves no rank behind."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.delenv(SHARED)  # processes of a shared fork server lack the mark
    yield f"sqlite:///{tmp_path}/tuned.db"
    wait_until(lambda: not ranks_of(str(tmp_path)))


def autotax(*arguments: str, db: str, wait: bool = True) -> subprocess.Popen[str]:
    brief = ["--soak", "1"] if arguments[0] == "tune" else []  # the usual number takes ten seconds
    command = [sys.executable, "-m", "autotax", *arguments, *brief, "--backend", "cpu", "--db", db]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if wait:
        process.wait(timeout=280)
    return process


def document(*arguments: str, db: str) -> Any:
    process = autotax(*arguments, "--json", db=db)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)["results"]


@dataclass(frozen=True)
class Tuned:
    what: list[str]
    db: str
    document: Any
    """The output of `tune --json`."""


@pytest.fixture(
    scope="module",
    params=[pytest.param((GEMM, 3), id="gemm"), pytest.param((DECODE, 3), id="decode", marks=pytest.mark.volume)],
)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A problem that one process has tuned and others use."""
    what, trials = request.param
    db = f"sqlite:///{tmp_path_factory.mktemp('tuned')}/tuned.db"
    [report] = document("tune", *what, "--trials", str(trials), db=db)
    assert report["trials"] == {"ok": trials}
    return Tuned(what, db, report)


def test_a_second_process_looks_up_what_the_first_one_tuned(tuned: Tuned) -> None:
    assert set(tuned.document) >= {"problem", "hardware", "winner", "trials", "seconds", "db"}
    winner = tuned.document["winner"]
    assert set(winner) == {
        "variant", "config", "latency_us", "interval_us", "back_to_back_us", "baseline_us", "speedup", "interval", "verified",
        "tie",
    }  # fmt: skip
    assert winner["verified"] and winner["interval"][0] <= winner["speedup"] <= winner["interval"][1]

    [answer] = document("lookup", *tuned.what, db=tuned.db)
    assert (answer["match"], answer["variant"], answer["config"]) == ("exact", winner["variant"], winner["config"])

    [compared] = document("compare", *tuned.what, db=tuned.db)
    rows = {row["name"]: row for row in compared["rows"]}
    assert set(rows) == {"autotax", "bsp-eager"} and all(row["verified"] for row in rows.values())
    assert rows["autotax"]["variant"] == winner["variant"]

    with Store.open(tuned.db, create=False) as store:
        kept = [trial for trial in store.trials() if "stage" not in trial.conditions]
    assert len(kept) == tuned.document["trials"]["ok"]


def use_winner(world: World, problem: Problem, db: str) -> tuple[str, str, float]:
    """Acts as a user's program: looks the config up, makes an operator from it, calls it."""
    config = lookup(problem, hardware=detect("cpu"), db=db)
    context = Context(world, open_heap(world, 64 << 20), detect("cpu"))
    operator = prepare(problem, config, context)
    context.heap.check()
    call = make_inputs(problem, 5, world.rank, world.device)
    operator(*call.tensors, call.out)
    error = relative_error(call.out, reference(problem, 5, world.rank, world.device))
    context.heap.close()
    return config.match, config.variant, error


def test_a_program_looks_the_winner_up_and_runs_it(tuned: Tuned) -> None:
    for match, variant, error in run_ranks(use_winner, 2, "cpu", problem_from_dict(tuned.document["problem"]), tuned.db):
        assert (match, variant) == ("exact", tuned.document["winner"]["variant"]) and error < 1e-5


def test_a_recorded_search_can_be_replayed(tuned: Tuned) -> None:
    problem = problem_from_dict(tuned.document["problem"])
    with Store.open(tuned.db, create=False) as store:
        trials = [trial for trial in store.trials(problem) if "stage" not in trial.conditions]
    replayed = ReplayRunner.of(trials)
    candidates = [Candidate(trial.config, ON_CPU) for trial in trials]
    for trial, alone in zip(trials, (replayed.measure(problem, [c], Effort())[0] for c in candidates), strict=True):
        assert (alone.status, alone.latency_us, alone.slowest_rank) == (trial.status, trial.latency_us, trial.slowest_rank)
    together = replayed.measure(problem, candidates, Effort())
    assert len({len(m.rounds) for m in together}) == 1, "samples of one measurement are paired"


def ranks_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if child.name() == "autotax-rank"]


def wait_until(true: Any, seconds: float = 280) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trials_in(db: str) -> int:
    with Store.open(db, create=False) as store:
        return store.counts()["trials"] if store.exists else 0


@pytest.mark.volume
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_run_that_was_ended_leaves_nothing_behind_and_is_resumed(how: signal.Signals, db: str) -> None:
    process = autotax("tune", *GEMM, "--trials", "500", db=db, wait=False)
    wait_until(lambda: len(ranks_below(process)) == 2)
    ranks = ranks_below(process)
    assert {rank.pid for rank in ranks_of(os.environ[MARK])} == {rank.pid for rank in ranks}
    wait_until(lambda: trials_in(db) >= 1)
    os.kill(process.pid, how)
    process.wait(timeout=280)
    psutil.wait_procs(ranks, timeout=280)
    assert not any(rank.is_running() for rank in ranks)
    before = trials_in(db)
    assert 1 <= before < 500
    with Store.open(db, create=False) as store:  # who was asked to end has said so, and what was measured is not to blame
        assert [run.status for run in store.runs()] == ["running" if how == signal.SIGKILL else "interrupted"]

    [report] = document("tune", *GEMM, "--trials", str(before + 2), db=db)
    assert sum(report["trials"].values()) == before + 2
    with Store.open(db, create=False) as store:
        kept = [trial for trial in store.trials() if "stage" not in trial.conditions]
    assert len(kept) == before + 2 == len({trial.config for trial in kept})


FATES = {
    "bsp": "ok",
    "wrong_element": "wrong_result",
    "skips_tile": "wrong_result",
    "only_first_input": "wrong_result",
    "raises": "crash",
    "exits": "crash",
    "killed": "crash",
    "late": "crash",
    "spoils_inputs": "wrong_result",
    "kernel_hang": "hang",
    "no_memory": "out_of_resources",
    "does_not_compile": "compile_error",
}


@pytest.mark.volume  # of what tests of the runner show one by one
def test_every_kind_of_bad_candidate_costs_one_trial_of_a_run(db: str) -> None:
    hardware = detect("cpu")
    problem = AllGatherGemm(48, 40, 32, "fp32", "m", 2)
    names = list(FATES)
    space = Space(problem, hardware, {name: VariantSpace(name, seeds=(Config(name),)) for name in names})
    runner = LiveRunner(hardware, 2, deadline_s=10, modules=("tests.runner.faults",))
    with Store.open(db) as store:
        verdict = tune(
            problem, hardware=hardware, runner=runner, store=store, environment=runner.environment,
            settings=Settings(trials=50), space=space,
        )  # fmt: skip
        runner.close()
        kept = {trial.config.variant: trial for trial in store.trials(problem) if "stage" not in trial.conditions}
    assert verdict.winner and verdict.winner.measurement.config == Config("bsp")
    assert set(kept) == set(names) and len(verdict.trials) > 1
    statuses = {name: trial.status for name, trial in kept.items()}
    assert statuses == FATES
    assert all(trial.error for name, trial in kept.items() if name != "bsp")
