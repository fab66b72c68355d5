"""`tune --model` and `--dry-run`: the problems of a model, listed or tuned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotax import AllGatherGemm, GemmReduceScatter
from tests.cli.conftest import GPUS, Ranks, Run, Tuner, on_machine
from tests.engines.test_architectures import DEEPSEEK_V3, LLAMA_70B, grouped

SMALL = grouped("llama", 64, 4, 2, intermediate_size=96)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_a_model_is_tuned_problem_by_problem(run: Run, tuner: Tuner, config: Path) -> None:
    documents = run("tune", "--model", config, "--tp", 2, "--tokens", "3,8", "--dtype", "fp32", "--trials", 5, "--json").results
    expected = [
        AllGatherGemm(8, 64, 64, "fp32", "m", 2),
        GemmReduceScatter(3, 64, 32, "fp32", "replicated", 2),
        GemmReduceScatter(8, 64, 32, "fp32", "replicated", 2),
        GemmReduceScatter(8, 64, 32, "fp32", "scattered", 2),
        AllGatherGemm(8, 96, 64, "fp32", "m", 2),
        GemmReduceScatter(3, 64, 48, "fp32", "replicated", 2),
        GemmReduceScatter(8, 64, 48, "fp32", "replicated", 2),
        GemmReduceScatter(8, 64, 48, "fp32", "scattered", 2),
    ]
    assert [each["problem"] for each in documents] == [problem.to_dict() for problem in expected]
    assert {problem for problem, _ in tuner.asked} == set(expected)
    assert {settings.trials for _, settings in tuner.asked} == {5}


def test_a_dry_run_lists_the_plan_and_touches_nothing(run: Run, tuner: Tuner, ranks: Ranks, config: Path, db: Path) -> None:
    shown = run("tune", "--model", config, "--tp", 2, "--tokens", 8, "--dry-run")
    assert shown.code == 0
    assert "down of the MLP" in shown.out and "fallback: bsp" in shown.out and "for 6 problems" in shown.out
    whole = run("tune", "--model", config, "--tp", 2, "--tokens", 8, "--dry-run", "--trials", 30, "--json").whole
    assert [each["layers"] for each in whole["results"]] == [
        *["QKV", "attention output", "attention output", "gate, up of the MLP", "down of the MLP", "down of the MLP"]
    ]
    assert {each["expected_s"] for each in whole["results"]} == {60.0}, "two seconds a trial on CPU ranks"
    assert whole["about"]["expected_s"] == 360.0
    assert not tuner.asked and not ranks.started and not db.exists()


@pytest.mark.usefixtures("tuner")
def test_the_time_that_is_expected_is_that_of_runs_here(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, GPUS)
    asked = ["tune", "--model", config, "--tp", 2, "--tokens", 8, "--dry-run", "--json"]
    before = run(*asked).results
    assert run("tune", "all-gather-gemm", "--m", 64, "--n", 96, "--k", 64).code == 0
    for old, new in zip(before, run(*asked).results, strict=True):
        recorded = new["problem"]["op"] == "all-gather-gemm"
        assert (new["basis"] == "the runs recorded on this machine") == recorded
        assert (new["expected_s"] == old["expected_s"]) != recorded


def test_on_gpus_the_plan_is_that_of_gpus(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, GPUS)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    whole = run("tune", "--model", path, "--tokens", "1,64", "--kv-len", 32768, "--dry-run", "--json").whole
    assert {each["problem"]["world_size"] for each in whole["results"]} == {4}
    assert {each["expected_s"] for each in whole["results"]} == {15.0}
    assert len(whole["about"]["notes"]) == 1
    assert {each["problem"]["op"] for each in whole["results"]} == {
        *["all-gather-gemm", "gemm-reduce-scatter", "head-gather", "decode-merge"]
    }


def test_any_tuning_can_be_planned(run: Run, tuner: Tuner) -> None:
    [planned] = run("tune", "all-gather-gemm", "--m", 64, "--n", 96, "--k", 64, "--dry-run", "--json").results
    assert (planned["trials"], planned["layers"], planned["match"]) == (60, "", "fallback")
    assert "for 1 problem," in run("tune", "all-gather-gemm", "--m", 64, "--n", 96, "--k", 64, "--dry-run").out
    assert not tuner.asked


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["all-gather-gemm", "--m", "8", "--n", "8", "--k", "8"], "operator all-gather-gemm, --m, --n, --k given with --model"),
        (["--shapes", "nowhere.toml"], "nowhere.toml"),
        (["--misses"], "--misses given with --model"),
        (["--world-size", "2"], "--world-size given with --model"),
        (["--tp", "3"], "on 3 ranks, which must divide it: give another --tp"),
        (["--tp", "0"], "tp is 0"),
        (["--tokens", "8...1"], "tokens is '8...1'"),
    ],
)
def test_what_does_not_go_with_a_model_is_refused(
    run: Run, tuner: Tuner, db: Path, config: Path, more: list[str], said: str
) -> None:
    assert said in run("tune", *more, "--model", config).complaint
    assert not tuner.asked and not db.exists()


@pytest.mark.parametrize("more", [["--tp", "2"], ["--tokens", "8"], ["--train"], ["--split"]])
def test_options_of_a_model_need_one(run: Run, more: list[str]) -> None:
    assert f"{more[0]} given without --model" in run("tune", *more).complaint


def test_a_model_too_large_for_this_machine_is_refused(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B | {"hidden_size": 2**22}))
    assert "GiB a rank to be measured" in run("tune", "--model", path, "--tp", 2).complaint
    assert not tuner.asked
