"""`tune --model` and `--dry-run`: the problems of a model, listed or tuned."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from autotax import AllGatherGemm, GemmReduceScatter
from autotax.cli.tune import PACES
from autotax.db.lookup import reload
from autotax.engines.thresholds import token_ranges
from autotax.hardware import detect
from autotax.operators import problem_from_dict
from autotax.spaces import space_for
from tests.cli.conftest import BSP, GPUS, Ranks, Run, Tuner, keep_winner, on_machine
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
    assert [document["problem"] for document in documents] == [problem.to_dict() for problem in expected]
    assert {problem for problem, _ in tuner.asked} == set(expected)
    assert {settings.trials for _, settings in tuner.asked} == {5}


def test_a_dry_run_lists_the_plan_and_touches_nothing(run: Run, tuner: Tuner, ranks: Ranks, config: Path, db: Path) -> None:
    shown = run("tune", "--model", config, "--tp", 2, "--tokens", 8, "--dry-run")
    assert shown.code == 0
    assert "down of the MLP" in shown.out and "fallback: bsp" in shown.out and "for 6 problems" in shown.out
    whole = run("tune", "--model", config, "--tp", 2, "--tokens", 8, "--dry-run", "--trials", 30, "--json").whole
    assert [entry["layers"] for entry in whole["results"]] == [
        *["QKV", "attention output", "attention output", "gate, up of the MLP", "down of the MLP", "down of the MLP"]
    ]
    assert {entry["expected_s"] for entry in whole["results"]} == {60.0}, "two seconds a trial on CPU ranks"
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
        assert (new["basis"] == "the runs recorded in the database") == recorded
        assert (new["expected_s"] == old["expected_s"]) != recorded


def test_on_gpus_the_plan_is_that_of_gpus(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, GPUS)
    path, recorded = tmp_path / "config.json", tmp_path / "paces.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    paces = json.loads(PACES.read_text())
    del paces[GPUS.device]["decode-merge"]
    recorded.write_text(json.dumps(paces))
    monkeypatch.setattr("autotax.cli.tune.PACES", recorded)
    whole = run("tune", "--model", path, "--tokens", "1,64", "--kv-len", 32768, "--dry-run", "--json").whole
    assert {entry["problem"]["world_size"] for entry in whole["results"]} == {4}
    assert {entry["basis"] for entry in whole["results"]} == {
        *["the runs recorded on NVIDIA H200", "the runs recorded on NVIDIA H100 80GB HBM3"]
    }, "an operator that was not tuned on this device has the pace of another"
    assert len(whole["about"]["notes"]) == 2
    assert {entry["problem"]["op"] for entry in whole["results"]} == {
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
        (["--tokens", ""], "tokens is ''"),
        (["--scales", "row"], "--scales given with --model"),
        (["--dtype", "e4m3"], "states no FP8 weights that plugins take: add --quantize row"),
        (["--dtype", "bf16", "--quantize", "row"], "only e4m3 takes it: take one of the two out"),
        (["--quantize", "none"], "allowed are row, block, static: give --dtype bf16"),
        (["--quantize", "rows"], "did you mean row?"),
    ],
)
def test_what_does_not_go_with_a_model_is_refused(
    run: Run, tuner: Tuner, db: Path, config: Path, more: list[str], said: str
) -> None:
    assert said in run("tune", *more, "--model", config).complaint
    assert not tuner.asked and not db.exists()


FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}


@pytest.mark.parametrize(
    ("stated", "more", "quantize"),
    [
        ({}, ["--dtype", "e4m3", "--quantize", "row"], "row"),
        ({}, ["--quantize", "block"], "block"),
        (FP8, ["--dtype", "e4m3"], "static"),
        (FP8, ["--quantize", "row"], "row"),
        (FP8, ["--dtype", "bf16"], None),
    ],
)
def test_fp8_weights_are_those_of_the_config_or_of_the_command(
    run: Run, tmp_path: Path, stated: dict[str, object], more: list[str], quantize: str | None
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B | stated))
    planned = run("tune", "--model", path, "--tp", 2, "--tokens", 8, "--kv-len", 8192, "--dry-run", *more, "--json").results
    products = [entry["problem"] for entry in planned if "k" in entry["problem"]]
    assert {problem.get("quantize") for problem in products} == {quantize}
    assert {problem["dtype"] for problem in products} == {"e4m3" if quantize else "bf16"}
    assert {entry["problem"]["dtype"] for entry in planned if "k" not in entry["problem"]} == {"bf16"}


@pytest.mark.parametrize("more", [["--tp", "2"], ["--tokens", "8"], ["--train"], ["--split"]])
def test_options_of_a_model_need_one(run: Run, more: list[str]) -> None:
    assert f"{more[0]} given without --model" in run("tune", *more).complaint


def test_a_model_too_large_for_this_machine_is_refused(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B | {"hidden_size": 2**22}))
    assert "GiB a rank to be measured" in run("tune", "--model", path, "--tp", 2).complaint
    assert not tuner.asked


PLANS = {
    "vllm": {("gemm-reduce-scatter", "replicated"), ("decode-merge", "head_scatter")},
    "torch": {("all-gather-gemm", None), ("gemm-reduce-scatter", "scattered")},
}
PLANS["sglang"] = PLANS["vllm"] | PLANS["torch"]


@pytest.mark.parametrize("engine", PLANS)
def test_a_laptop_plans_for_a_server_and_its_engine(run: Run, tmp_path: Path, db: Path, engine: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    plan = ["tune", "--model", path, "--tokens", "8,64", "--kv-len", 32768, "--for", engine, "--hardware", "h100x8", "--dry-run"]
    whole = run(*plan, "--json").whole
    assert {(entry["problem"]["op"], entry["problem"].get("output")) for entry in whole["results"]} == PLANS[engine]
    assert {entry["problem"]["world_size"] for entry in whole["results"]} == {8}
    assert all(entry["basis"] == "the runs recorded on NVIDIA H100 80GB HBM3" for entry in whole["results"])
    shown = run(*plan).out
    assert "8 x NVIDIA H100 80GB HBM3" in shown and "expected: " in shown and not db.exists()


def test_a_winner_of_a_planned_problem_is_found_by_the_plugin(run: Run, config: Path, db: Path) -> None:
    plan = run("tune", "--model", config, "--tp", 2, "--tokens", 8, "--for", "vllm", "--dry-run", "--json").results
    for entry in plan:
        problem = problem_from_dict(entry["problem"])
        keep_winner(db, problem, detect("cpu"), space_for(problem, detect("cpu")).default("push"), BSP)
        reload()
        sizes = entry["problem"]
        ranges = token_ranges(sizes["n"], sizes["k"], sizes["dtype"], 2, hardware=detect("cpu"), db=db)
        assert any(first <= 8 <= last for first, last in ranges)


def test_plans_for_machines_and_engines_that_are_not_known_are_refused(run: Run, config: Path) -> None:
    assert "allowed are h100, h200, b200, mi300 with a number" in run("tune", "--hardware", "h100", "--dry-run").complaint
    assert "add --dry-run" in run("tune", "--hardware", "h100x8").complaint
    assert "allowed are vllm, sglang, torch" in run("tune", "--model", config, "--for", "trt").complaint
    assert "--for given without --model" in run("tune", "--for", "vllm").complaint


def test_the_recorded_paces_are_those_of_the_results() -> None:
    assert runpy.run_path(str(Path(__file__).parents[2] / "results/paces.py"))["paces"]() == json.loads(PACES.read_text())
