"""Several tuners share a database, and a problem: each goes on as if it were alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from sqlalchemy.exc import IntegrityError

from autotax.core.errors import MachineError
from autotax.db import Store
from autotax.software import environment
from autotax.tuner import Settings, run_recorder
from tests.tuner.shared import GEMM, H200, gemm_landscape, run
from tests.tuner.synthetic import SyntheticRunner
from tests.tuner.test_trouble import At

pytestmark = pytest.mark.usefixtures("optunas_tables")


def trials_of(store: Store) -> list[list[str]]:
    """The states of the trials of each study."""
    names = optuna.get_all_study_names(store.url)
    return [[t.state.name for t in optuna.load_study(study_name=n, storage=store.url).get_trials()] for n in names]


@pytest.mark.sampled
@pytest.mark.parametrize("seen_as", ["alive", "gone"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_second_tuner_of_a_problem_harms_no_first(
    store: Store, monkeypatch: pytest.MonkeyPatch, seen_as: str, fresh: bool
) -> None:
    """The second tuner starts while the first measures. It may think the first is dead: two containers may share a name."""
    host, boot, number = run_recorder.this_process()
    verdicts = []

    def second() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(run_recorder, "this_process", lambda: [host, boot, number])
            verdicts.append(run(store, SyntheticRunner(gemm_landscape), trials=2, resume=not fresh))

    monkeypatch.setattr(run_recorder, "this_process", lambda: [host, boot, os.getppid() if seen_as == "alive" else number])
    verdicts.append(run(store, At(3, second), trials=8))
    assert all(verdict.winner for verdict in verdicts) and [record.status for record in store.runs()] == ["done", "done"]
    assert [sum(verdict.trials.values()) for verdict in verdicts] == [2, 8]
    complete = [states.count("COMPLETE") for states in trials_of(store)]
    assert complete == ([8, 2] if fresh else [8]), "all that was measured"


def test_later_runs_go_on_from_the_last_that_began_anew(store: Store) -> None:
    for trials, resume in ((4, True), (5, False), (6, True)):
        run(store, SyntheticRunner(gemm_landscape), trials=trials, resume=resume)
    assert [len(states) for states in trials_of(store)] == [4, 6]


def test_a_study_that_is_deleted_ends_the_run_with_one_line(store: Store) -> None:
    def delete() -> None:
        for name in optuna.get_all_study_names(store.url):
            optuna.delete_study(study_name=name, storage=store.url)

    with pytest.raises(MachineError, match=r"lost the study .* run the same command again"):
        run(store, At(3, delete), trials=8)
    runner = SyntheticRunner(gemm_landscape)
    assert run(store, runner, trials=8).winner and len(runner.searched) == 5


def test_of_two_that_make_optunas_tables_at_once_both_get_them(tmp_path: Path) -> None:
    url, made = f"sqlite:///{tmp_path}/tuned.db", []

    @sqlalchemy.event.listens_for(sqlalchemy.MetaData, "before_create")
    def be_slower(*_: Any, **__: Any) -> None:
        """Another tuner creates the tables between the check and the creation."""
        if not made:
            made.append(True)
            made.append(run_recorder.open_study(url, "other", 1, Settings()))

    try:
        mine = run_recorder.open_study(url, "mine", 2, Settings())
    finally:
        sqlalchemy.event.remove(sqlalchemy.MetaData, "before_create", be_slower)
    assert len(made) == 2 and mine.ask().number == 0
    assert optuna.get_all_study_names(url) == ["other", "mine"]


def test_tables_that_never_come_end_the_run_with_one_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed"))

    monkeypatch.setattr(run_recorder, "RDBStorage", fail)
    monkeypatch.setattr(run_recorder, "TABLES_PAUSE_S", 0.0)
    with pytest.raises(MachineError, match=r"^database \S+ does not take the tables of Optuna \(UNIQUE .*\): mend"):
        run(store, SyntheticRunner(gemm_landscape), trials=2)


def test_last_words_that_cannot_be_removed_are_left(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may have become read-only since."""
    def refuse(self: Path, **_: Any) -> None:
        raise PermissionError(1, "Operation not permitted", str(self))

    run_id = store.begin_run(GEMM, H200, environment("cpu"), {})
    run_recorder.write_marker(store.url, run_id, "interrupted")
    monkeypatch.setattr(Path, "unlink", refuse)
    assert run(store, SyntheticRunner(gemm_landscape), trials=2).winner
    assert [record.status for record in store.runs()] == ["interrupted", "done"]
