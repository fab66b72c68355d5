"""Lists: winners, and trials as they are asked for."""

from __future__ import annotations

import csv
import io
import sqlite3
from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.db import Store, TrialRecord
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.software import environment
from autotax.spaces import space_for
from tests.cli.conftest import BSP, GPUS, PUSH, Result, Run, keep_winner

GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64", "--dtype", "fp32"]
PROBLEM = AllGatherGemm(64, 96, 64, "fp32", world_size=2)
OTHER = AllGatherGemm(128, 96, 64, "fp32", world_size=2)
REDUCED = GemmReduceScatter(128, 96, 64, "fp32", world_size=2)


def rows(result: Result) -> list[dict[str, str]]:
    assert result.code == 0
    return list(csv.DictReader(io.StringIO(result.out)))


def test_winners_a_line_each_and_whether_they_hold(run: Run, db: Path) -> None:
    assert "holds no winners" in run("winners").out and not db.exists()
    keep_winner(db, PROBLEM, detect("cpu"), PUSH, BSP)
    keep_winner(db, OTHER, detect("cpu"), PUSH, BSP, triton="3.0.0")
    keep_winner(db, OTHER, GPUS, PUSH, BSP)
    result = run("winners")
    assert "3 winners" in result.out and result.out.count("1.25x [1.20, 1.30]") == 3
    assert "no: triton 3.0.0 (here" in result.out and "no: measured on 4 x NVIDIA H200" in result.out
    assert "autotax refresh" in result.err, "the one of these devices can be proven again"
    assert [winner["stale"] is None for winner in run("winners", "--json").results] == [True, False, False]
    winners = rows(run("winners", "all-gather-gemm", "--csv"))
    assert [row["problem"] for row in winners] == [PROBLEM.key, OTHER.key, OTHER.key]
    assert winners[0]["config"] == "block_m=64 comm=16" and float(winners[0]["speedup"]) == 1.25 and winners[0]["stale"] == ""
    assert rows(run("winners", "flash-decode", "--csv")) == [] and len(rows(run("winners", "--backend", "cuda", "--csv"))) == 1


def test_lists_of_winners_label_each_fact_and_break_no_word_at_80_columns(
    run: Run, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    keep_winner(db, REDUCED, detect("cpu"), PUSH, BSP)
    file = tmp_path / "winners.json"
    common = {"config": "push block_m=64 comm=16", "vs BSP [95 %]": "1.25x [1.20, 1.30]"}
    own: dict[tuple[str, ...], dict[str, str]] = {
        ("winners",): {"holds here": "yes"},
        ("export", "--output", str(file)): {"tuned on": "CPU ranks on the Triton interpreter"},
        ("import", str(file)): {"outcome": "kept", "reason": "it is the same"},
    }
    for command, facts in own.items():
        lines = run(*command).out.splitlines()
        assert max(map(len, lines)) <= 80
        assert any(line.startswith("gemm-reduce-scatter m=128 n=96 k=64 dtype=fp32 output=scattered") for line in lines)
        for label, fact in (common | facts).items():
            assert any(line.strip().startswith(label) and fact in line for line in lines), (command, label)


@pytest.fixture
def several(db: Path) -> None:
    """A run of five trials: three times push, of which one is wrong, bsp, and one that hung."""
    with Store.open(db) as store:
        run_id = store.begin_run(PROBLEM, detect("cpu"), environment("cpu"), {})
        for number, us in enumerate((90.0, 70.0, 80.0)):
            config = Config.of("push", comm=number)
            store.add_trial(run_id, TrialRecord(number, config, "ok", us, [[us]], verified=True))
        store.add_trial(run_id, TrialRecord(3, BSP, "wrong_result", 10.0, error="wrong,\nby much"))
        store.add_trial(run_id, TrialRecord(4, Config.of("pull"), "hang", error="no answer"))


@pytest.mark.usefixtures("several")
def test_trials_as_they_are_asked_for(run: Run) -> None:
    assert [row["number"] for row in rows(run("trials", *GEMM, "--csv"))] == ["0", "1", "2", "3", "4"]
    assert [row["number"] for row in rows(run("trials", "--top", 2, "--csv"))] == ["1", "2"], "the fastest verified ones"
    assert [row["number"] for row in rows(run("trials", "--sort", "variant", "--csv"))] == ["3", "4", "1", "2", "0"]
    assert [row["error"] for row in rows(run("trials", "--status", "wrong_result", "--csv"))] == ["wrong, by much"]
    assert [trial["number"] for trial in run("trials", "--variant", "push", "--sort", "latency", "--json").results] == [1, 2, 0]
    assert "3 trials: 3 ok" in run("trials", "--variant", "push").out


def test_a_pin_is_python_that_makes_the_config(run: Run, db: Path) -> None:
    config = Config.of("push", space_for(PROBLEM, detect("cpu")).default("push").values)
    keep_winner(db, PROBLEM, detect("cpu"), config, BSP)
    result = run("lookup", *GEMM, "--pin")
    assert result.out.count("\n") == 1 and result.out.startswith("autotax.Config.of('push', ")
    assert eval(result.out, {"autotax": __import__("autotax")}) == config


TRACED = "verify 0: NameError: name 'x' is not defined (mine.py:7)\nTraceback (most recent call last):\n  File mine.py, line 7"


def test_errors_are_shown_whole_and_their_first_line_elsewhere(run: Run, db: Path) -> None:
    with Store.open(db) as store:
        run_id = store.begin_run(PROBLEM, detect("cpu"), environment("cpu"), {})
        for number in range(3):
            store.add_trial(run_id, TrialRecord(number, Config.of("push", comm=number), "crash", error=TRACED))
    plain, whole = run("trials", *GEMM).out, run("trials", *GEMM, "--variant", "push", "--errors").out
    assert "(mine.py:7)" in plain and "Traceback" not in plain
    assert f"crash: {TRACED}" in whole and "and 2 more with the same error" in whole and whole.count("Traceback") == 1


def test_an_empty_list_says_what_it_leaves_out(run: Run, db: Path) -> None:
    keep_winner(db, PROBLEM, detect("cpu"), PUSH, BSP)
    keep_winner(db, OTHER, detect("cpu"), PUSH, BSP)
    for command, words in {
        ("winners", "flash-decode"): "holds 2 other winners: leave OP out to see them",
        ("winners", "--backend", "rocm"): "holds 2 other winners: leave --backend out to see them",
        ("trials", "--status", "hang"): "holds 2 other trials: leave --status out to see them",
        ("trials", *GEMM, "--variant", "pull"): "leave the problem and --variant out to see them",
    }.items():
        assert words in run(*command).err, command
    assert "other" not in run("winners").err + run("trials").err
    with sqlite3.connect(db) as tables:  # as if the winners were of an operator that is not loaded
        tables.execute("UPDATE autotax_problem SET op = 'mine' WHERE op = 'all-gather-gemm'")
    assert "hidden (2 of mine): --load the modules that declare them" in run("winners").err
    assert "hidden (2 of mine): --load the modules that declare them" in run("trials").err
    assert "or --load its module" in run("lookup", "mine", "--n", "4").complaint
