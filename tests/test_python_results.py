"""Results in Python: short representations, data frames, and plots for notebooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import autotax
from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.core.errors import MARK
from autotax.db import Store
from autotax.operators.declaration import ONLY_OURS_VARIABLE
from autotax.runner.measurement import Candidate
from autotax.tuner import Comparison, Row, Verdict
from autotax.tuner.progress import FailedVariant
from tests.report.test_tables import CPUS, PROBLEM, a_measurement, a_verdict
from tests.tuner.shared import gemm_landscape
from tests.tuner.shared import run as tune
from tests.tuner.synthetic import SyntheticRunner


@pytest.fixture
def pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))


def compared(verdict: Verdict) -> Comparison:
    """The finalists of a verdict as rows of a comparison."""
    rows = [Row(s.measurement.config.variant, s.measurement.config.variant, s.measurement, s.speedup) for s in verdict.standings]
    return Comparison(verdict.problem, verdict.hardware, verdict.conditions, tuple(rows))


def test_representations_are_short_and_say_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY_OURS_VARIABLE, "1")  # the landscape has no others
    with Store.open(f"sqlite:///{tmp_path}/a.db") as store:
        verdict = tune(store, SyntheticRunner(gemm_landscape), trials=20)
        trials = autotax.trials(db=store.url)
    assert len(repr(verdict)) < 400 and "x over BSP [" in repr(verdict) and repr(verdict).endswith("; 20 trials>")
    bsp = verdict.standings[-1]
    kept = replace(verdict, winner=replace(bsp, measurement=replace(bsp.measurement, candidate=Candidate(Config.of("bsp")))))
    assert ": nothing beats BSP yet, " in repr(kept) and "x over BSP" not in repr(kept)
    failed = FailedVariant("mine", 3, "crash", f"first line (own.py:31){MARK}many lines")
    assert "; mine failed in all 3 trials: crash: first line (own.py:31); 20 t" in repr(replace(verdict, failed=(failed,)))
    assert all(len(repr(trial)) < 1000 for trial in trials), "without samples"
    assert repr(trials).startswith(f"<Trials: {len(trials)} (") and len(autotax.trials(status="hang", db=store.url)) == 0
    for result, words in ((trials, "the search"), (verdict, " wins: "), (compared(verdict), "compared")):
        shown = autotax.plot(result)
        assert "<svg" in shown._repr_html_() and words in repr(shown) and len(repr(shown)) < 400
    assert "<svg" in trials._repr_html_() and "<svg" not in autotax.plot([])._repr_html_()
    assert repr(a_measurement(80.0)) == "<Measurement push(): ok, 80.0 us, 1 samples>"


@pytest.mark.usefixtures("pandas")
def test_results_become_data_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY_OURS_VARIABLE, "1")  # the landscape has no others
    frame = a_verdict().to_frame()
    assert (frame[0]["variant"], frame[0]["latency_us"], frame[0]["winner"]) == ("push", 118.2, True)
    rows = (Row("autotax", "push", a_measurement(80.0), 1.25),)
    compared = Comparison(PROBLEM, CPUS, ON_CPU, rows)
    assert compared.to_frame()[0]["speedup"] == 1.25 and "autotax 80.0 us" in repr(compared)
    with Store.open(f"sqlite:///{tmp_path}/a.db") as store:
        tune(store, SyntheticRunner(gemm_landscape), trials=4)
        assert {"variant", "latency_us", "stage"} <= autotax.trials(db=store.url).to_frame()[0].keys()


def test_what_is_no_problem_and_no_status_is_refused(tmp_path: Path) -> None:
    db, word = f"sqlite:///{tmp_path}/a.db", cast(Any, "all-gather-gemm")
    for function in (autotax.trials, autotax.tune, autotax.compare):
        with pytest.raises(autotax.UsageError, match=r"problem is 'all-gather-gemm'; it must be a problem, as autotax\.All"):
            function(word, db=db)
    with pytest.raises(autotax.UsageError, match="status is 'okk'; allowed are ok, "):
        autotax.trials(status="okk", db=db)
    assert repr(autotax.trials(db=db)) == "<Trials: 0 (none)>" and not list(tmp_path.iterdir())


def test_without_pandas_a_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(autotax.UsageError, match="pip install pandas"):
        a_verdict().to_frame()


P = autotax.DecodeMerge(2, 4, 64, "fp32", 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autotax.lookup("x"), "problem is 'x'; it must be a problem"),  # type: ignore[arg-type]
        (lambda: autotax.lookup(P, conditions="eager"), "conditions is 'eager'; it must be of type Conditions"),  # type: ignore[arg-type]
        (lambda: autotax.lookup(P, hardware="h100"), "hardware is 'h100'; it must be of type Hardware"),  # type: ignore[arg-type]
        (lambda: autotax.lookup(P, db=3), "db is 3; it must be of type str or Path"),  # type: ignore[arg-type]
        (lambda: autotax.tune(P, trials="many"), "trials is 'many'; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: autotax.tune(P, trials=True), "trials is True; it must be a whole number"),
        (lambda: autotax.tune(P, variants="words"), r"variants is 'words'; .* give \['words'\]"),
        (lambda: Conditions(skew_us="x"), "skew is 'x'; it must be a number"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_other_types_are_refused_in_a_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(autotax.UsageError, match=message):
        call()


@pytest.mark.volume
def test_look_ups_see_what_this_process_tuned_and_its_callbacks_are_called_beside_the_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    problem, db = autotax.DecodeMerge(2, 4, 64, "fp32", 2), f"sqlite:///{tmp_path}/a.db"
    assert autotax.lookup(problem, db=db).match == "fallback"
    done: list[int] = []
    autotax.tune(
        problem, trials=1, soak=0, variants=["words"], db=db, progress=True, on_progress=lambda now: done.append(now.done)
    )
    assert autotax.lookup(problem, db=db).match == "exact"
    assert done and "1/1 trials" in capfd.readouterr().err
