"""A database that is busy is waited for, one that is gone ends the run, and a tuner that was killed twice learns from it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from autotax.core.config import Config
from autotax.core.errors import MachineError
from autotax.core.problem import Problem
from autotax.db import DatabaseBusy, Store, connection
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.spaces import space_for
from autotax.tuner import run_recorder
from tests.tuner.shared import GEMM, H200, Ear, gemm_landscape, run
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("optunas_tables")


class At(SyntheticRunner):
    """Calls a function once, after a given number of searched configs."""

    def __init__(self, count: int, action: Any) -> None:
        super().__init__(gemm_landscape)
        self.count, self.action = count, action

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        measurements = super().measure(problem, candidates, effort)
        if len(self.searched) == self.count:
            self.count = -1
            self.action()
        return measurements


def file_of(store: Store) -> Path:
    return Path(store.url.removeprefix("sqlite:///"))


def lock(path: Path, released: threading.Event) -> threading.Thread:
    """Stands in for another program: holds the write lock until `released` is set."""
    taken = threading.Event()

    def hold() -> None:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        taken.set()
        released.wait(500)
        other.execute("ROLLBACK")
        other.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(250)
    return thread


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    """A store whose connections, and Optuna's, wait a tenth of a second for a lock."""
    monkeypatch.setattr(connection, "BUSY_SECONDS", 0.1)
    monkeypatch.setattr(run_recorder, "BUSY_S", 0.1)
    return Store.open(f"sqlite:///{tmp_path}/tuned.db")


def test_a_locked_database_is_waited_for_and_nothing_is_lost(impatient: Store) -> None:
    holders: list[threading.Thread] = []
    released = threading.Event()
    runner = At(4, lambda: holders.append(lock(file_of(impatient), released)))

    class Releasing(Ear):
        def notice(self, text: str) -> None:
            super().notice(text)
            released.set()

    ear = Releasing()
    verdict = run(impatient, runner, trials=10, listener=ear)
    holders[0].join()
    assert verdict.winner and len(runner.searched) == len(set(runner.searched)) == 10
    assert len([t for t in impatient.trials() if "stage" not in t.conditions]) == 10
    assert ear.notices == [run_recorder.WAITING] and impatient.runs()[0].notices == (run_recorder.WAITING,)


@pytest.mark.parametrize("where", ["add_trial", "set_user_attr"])
def test_optuna_waits_too(store: Store, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Each of its calls finds the database locked, every second time."""
    import optuna

    owner, real, calls = optuna.Study, getattr(optuna.Study, where), 0

    def now_and_then(study: optuna.Study, *args: Any) -> Any:
        nonlocal calls
        if isinstance(study._storage, optuna.storages.InMemoryStorage):  # what the sampler learns from
            return real(study, *args)
        calls += 1
        if calls % 2:
            raise sqlite3.OperationalError("database is locked")
        return real(study, *args)

    monkeypatch.setattr(run_recorder, "PAUSE_S", 0.0)
    monkeypatch.setattr(owner, where, now_and_then)
    ear, runner = Ear(), SyntheticRunner(gemm_landscape)
    assert run(store, runner, trials=8, listener=ear).winner
    assert len(runner.searched) == 8 and ear.notices == [run_recorder.WAITING] and calls > 8


def test_a_database_that_stays_locked_ends_the_run_in_the_end(impatient: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_recorder, "LONGEST_WAIT_S", 0.5)
    holders: list[threading.Thread] = []
    released = threading.Event()
    with pytest.raises(DatabaseBusy):
        run(impatient, At(3, lambda: holders.append(lock(file_of(impatient), released))), trials=10)
    released.set()
    holders[0].join()
    assert impatient.counts()["trials"] == 2
    assert run(impatient, SyntheticRunner(gemm_landscape), trials=10).winner, "and the next goes on"
    assert impatient.counts()["trials"] > 10


def test_a_full_disk_ends_the_run_with_what_was_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full twice, each time during the same config, so that the run cannot even record its end."""
    disk = SimpleNamespace(room=3, full=False)
    add_trial, end_run = Store.add_trial, Store.end_run

    def add(self: Store, *args: Any) -> int:
        disk.full, disk.room = disk.room == 0, max(0, disk.room - 1)
        return add_trial(self, *args) if not disk.full else fail()

    def end(self: Store, *args: Any) -> None:
        return end_run(self, *args) if not disk.full else fail()

    def fail() -> Any:
        raise MachineError("database cannot be written any more (database or disk is full)")

    runners = [SyntheticRunner(gemm_landscape) for _ in range(3)]
    for runner in runners[:2]:
        disk.full = False
        with monkeypatch.context() as patch, pytest.raises(MachineError, match="disk is full"):
            patch.setattr(Store, "add_trial", add)
            patch.setattr(Store, "end_run", end)
            run(store, runner, trials=10)
    assert store.counts()["trials"] == 3 and runners[1].searched == runners[0].searched[3:]
    run(store, runners[2], trials=10)
    assert len(runners[2].searched) == 7, "what was in flight is nobody's outcome: it is tried again"
    assert [record.status for record in store.runs()] == ["failed", "failed", "done"], "the database has heard of it in the end"
    assert not list(file_of(store).parent.glob("*failed*"))


def test_a_full_disk_of_the_ranks_is_no_configs_fault(store: Store) -> None:
    def full() -> None:
        raise MachineError("no space left on device")

    runner = At(5, full)
    with pytest.raises(MachineError, match="no space left"):
        run(store, runner, trials=10)
    assert store.counts()["trials"] == 4 and store.runs()[0].status == "failed"
    second = SyntheticRunner(gemm_landscape)
    run(store, second, trials=10)
    assert runner.searched[-1] in second.searched


class Killed(BaseException):
    """Stands in for SIGKILL: the run cannot record its end."""


Jobs = list[list[Config]]


def killed_in_job(store: Store, when: Callable[[list[Config], bool], bool], monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """A run that is killed in the first job of which `when` is true, told its configs and whether they are finalists."""
    jobs: Jobs = []

    class Deadly(SyntheticRunner):
        def measure(
            self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
        ) -> list[Measurement]:  # fmt: skip
            jobs.append([candidate.config for candidate in candidates])
            if when(jobs[-1], effort.samples != Effort().samples):
                raise Killed
            return super().measure(problem, candidates, effort)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_recorder.Study, "give_up", lambda *_: None)
        patch.setattr(Store, "end_run", lambda *_: None)
        run(store, Deadly(gemm_landscape), trials=12)
    return jobs


def killed_while_measuring(store: Store, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_in_job(store, lambda configs, _: config in configs, monkeypatch)


def test_what_was_measured_when_two_runs_were_killed_is_not_tried_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SyntheticRunner(gemm_landscape)
    run(store, first, trials=3)
    fourth = SyntheticRunner(gemm_landscape)
    run(store, fourth, trials=4, resume=False)
    deadly = fourth.searched[3]
    run(store, SyntheticRunner(gemm_landscape), trials=2, resume=False)
    killed_while_measuring(store, deadly, monkeypatch)
    killed_while_measuring(store, deadly, monkeypatch)  # once may be chance: it is tried again
    third = SyntheticRunner(gemm_landscape)
    verdict = run(store, third, trials=12)
    assert verdict.winner and deadly not in third.searched
    (kept,) = store.trials(GEMM, status="crash")
    assert kept.config == deadly and "when runs were killed" in (kept.error or "")
    assert sum(verdict.trials.values()) == 12


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_other_tuners_are_measuring_is_not_blamed(store: Store, monkeypatch: pytest.MonkeyPatch, elsewhere: bool) -> None:
    """Two that share the database: of another process that lives, or of another host, where nobody can tell."""
    config = space_for(GEMM, H200).default("push")
    host, boot, _ = run_recorder.this_process()
    for _ in range(2):
        with monkeypatch.context() as patch:
            writer = ["another host", boot, 1] if elsewhere else [host, boot, os.getppid()]
            patch.setattr(run_recorder, "this_process", mock.Mock(return_value=writer))
            killed_while_measuring(store, config, patch)
    runner = SyntheticRunner(gemm_landscape)
    verdict = run(store, runner, trials=12)
    assert config in runner.searched and verdict.winner and not store.trials(GEMM, status="crash") and not verdict.notices


@pytest.mark.parametrize("among_finalists", [False, True])
def test_bsp_is_tried_again_however_often_the_tuner_was_killed(
    store: Store, monkeypatch: pytest.MonkeyPatch, among_finalists: bool
) -> None:
    for _ in range(3):
        killed_in_job(store, lambda configs, final: Config("bsp") in configs and final == among_finalists, monkeypatch)
    assert run(store, SyntheticRunner(gemm_landscape), trials=6).winner


def test_a_finalist_that_kills_the_tuner_is_found_and_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = space_for(GEMM, H200).default("push")
    first, second = (killed_in_job(store, lambda job, final: final and deadly in job, monkeypatch) for _ in range(2))
    assert len(first[-1]) > 2 and second[-1] == [deadly], "those of a round that was fatal are gone through one by one"
    for _ in range(2):  # it stays known when a run has come to its end
        verdict = run(store, SyntheticRunner(gemm_landscape), trials=12)
        standing = {s.measurement.config for s in verdict.standings}
        assert verdict.winner and deadly not in standing and set(first[-1]) - {deadly} <= standing
    (kept,) = store.trials(GEMM, status="crash")
    assert kept.config == deadly and "when runs were killed" in (kept.error or "")
    left_out, one_by_one = store.runs()[2].notices
    assert str(deadly) in left_out and "one by one" in one_by_one and not verdict.notices


def test_an_interruption_does_not_count_as_a_kill(store: Store) -> None:
    run(store, SyntheticRunner(gemm_landscape), trials=1)
    for _ in range(3):  # each time while the same config is being measured
        interrupted = SyntheticRunner(gemm_landscape)
        interrupted.interrupt_after = 0
        run(store, interrupted, trials=6)
    second = SyntheticRunner(gemm_landscape)
    run(store, second, trials=8)
    assert not store.trials(GEMM, status="crash")
