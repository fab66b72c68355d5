"""A study in optuna-dashboard: names, the metric, and readable attributes."""

from __future__ import annotations

import optuna
import pytest

from autotax.db import Store
from tests.tuner.shared import H200, gemm_landscape, run
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("optunas_tables")


def test_a_study_can_be_read_by_people(store: Store) -> None:
    verdict = run(store, SyntheticRunner(gemm_landscape), trials=12)
    (name,) = optuna.get_all_study_names(store.url)
    assert name.startswith("all-gather-gemm m 512 x 7168 x 8192 | 4 x NVIDIA H200 | graph/cold/0 | triton ") and len(name) < 150
    study = optuna.load_study(study_name=name, storage=store.url)
    assert study.metric_names == ["latency (us)"]
    assert study.user_attrs["hardware"] == str(H200) and study.user_attrs["problem"] == verdict.problem.key
    assert verdict.winner is not None
    summary = study.user_attrs["verdict"]
    assert summary.startswith(f"{verdict.winner.measurement.config} is {verdict.winner.speedup:.2f}x faster than BSP (")
    for trial in study.get_trials():
        assert trial.state.name == "PRUNED" or trial.user_attrs["variant"] == trial.params["variant"]
        if trial.state.name == "COMPLETE" and trial.user_attrs["variant"] == "push":
            assert trial.value and abs(trial.user_attrs["times faster than BSP"] - 130.0 / trial.value) < 0.01


def test_the_study_of_another_run_of_the_same_problem_is_the_same(store: Store) -> None:
    for trials in (5, 8):
        run(store, SyntheticRunner(gemm_landscape), trials=trials)
    assert len(optuna.get_all_study_names(store.url)) == 1
