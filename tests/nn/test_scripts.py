"""The scripts whose figures of the modules are published, with small sizes on CPUs."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotax.core.conditions import ON_CPU
from autotax.db import Store
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "results/runtime/llama.py"
SIZES = (
    "--backend cpu --world-size 2 --hidden 64 --q-heads 4 --kv-heads 2 --head-dim 16 --ffn 96 --layers 2 --prefill 16"
    " --decode 1 2 --train 16 --kv-len 32 --rounds 1"
)
UNCHANGED = (
    "--backend cpu --world-size 2 --hidden 64 --q-heads 4 --kv-heads 2 --head-dim 16 --ffn 96 --layers 1 --tokens 16 --rounds 2"
    " --timeout 250"
)


@pytest.mark.volume
def test_both_editions_of_the_stack_compute_the_same(tmp_path: Path) -> None:
    db, out = tmp_path / "winners.db", tmp_path / "llama.json"
    problem, here = AllGatherGemm(16, 64, 64, "fp32", "m", 2), detect("cpu")
    config = space_for(problem, here).default("decomposed")
    down, few = (GemmReduceScatter(m, 64, 48, "fp32", output, 2) for m, output in ((16, "scattered"), (1, "replicated")))
    of_gate_up = GemmReduceScatter(16, 64, 96, "fp32", "scattered", 2, "kn")
    won = {gemm: space_for(gemm, here).default("push") for gemm in (down, few, of_gate_up)}
    with Store.open(db) as store:
        for gemm, winner in {problem: config, **won}.items():
            keep_winner(store, gemm, winner, here, environment("cpu"), ON_CPU)
    document, printed = scripted("llama.py", *SIZES.split(), "--timeout", "100", "--db", str(db), "--json", str(out))
    scenarios = {scenario["name"]: scenario for scenario in document["scenarios"]}
    assert list(scenarios) == ["prefill, 16 tokens", "decode, batch 1, KV 32", "decode, batch 2, KV 32", "train, 16 tokens"]
    assert [scenario["spread"] for scenario in scenarios.values()] == [True, False, True, True]
    assert all(scenario["equal"] and scenario["speedup"] > 0 for scenario in scenarios.values())
    assert 0 < max(scenario["relative_error"] for scenario in scenarios.values()) < 1e-5, "two ways of computing, not one"
    took = {(module["module"], module["problem"].get("m")): (module["match"], module["takes"]) for module in document["modules"]}
    assert (took["down", 16], took["down", 1]) == (("exact", str(won[down])), ("exact", str(won[few])))
    assert ("exact", str(won[of_gate_up])) in [(module["match"], module["takes"]) for module in document["modules"]]
    assert took["QKV", 16] == ("exact", str(config)) and took["QKV", 2] == ("fallback", "bulk-synchronous")
    assert "prefill, 16 tokens" in printed and "say nothing about GPUs" in printed


def test_sizes_that_the_ranks_cannot_share_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SIZES.split(), "--q-heads", "5", "--db", str(tmp_path / "none.db")])
    assert importlib.import_module("llama").main() == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == "llama.py: q_heads is 5; 2 ranks share it: give a multiple as --q-heads\n"


@pytest.mark.volume
@pytest.mark.parametrize("train", [[], ["--train"]], ids=["forward", "backward"])
def test_an_unchanged_stack_computes_the_same_in_all_editions(tmp_path: Path, train: list[str]) -> None:
    db, out, here = tmp_path / "winners.db", tmp_path / "async-tp.json", detect("cpu")
    down = GemmReduceScatter(16, 64, 48, "fp32", "scattered", 2)
    config = space_for(down, here).default("push")
    with Store.open(db) as store:
        keep_winner(store, down, config, here, environment("cpu"), ON_CPU)
    document, text = scripted("async_tp.py", *UNCHANGED.split(), *train, "--db", str(db), "--json", str(out))
    (scenario,) = document["scenarios"]
    assert scenario["equal"] and 0 < scenario["relative_error"]["autotax"] < 1e-5
    assert set(scenario["us"]) == {"NCCL", "torch async TP", "autotax"}
    assert str(config) in document["ran"] and "outputs equal" in text


@pytest.mark.volume
def test_the_script_of_fused_operators_times_every_way(tmp_path: Path) -> None:
    db, out, here = tmp_path / "winners.db", tmp_path / "fused.json", detect("cpu")
    gather = AllGatherGemm(16, 16, 16, "fp32", "m", 2)
    config = space_for(gather, here).default("push")
    with Store.open(db) as store:
        keep_winner(store, gather, config, here, environment("cpu"), ON_CPU)
    arguments = ["--backend", "cpu", "--rounds", "20", "--db", str(db), "--json", str(out)]
    document, _ = scripted("fused_overhead.py", *arguments)
    gathers, scatters = document["operators"]
    ways = [way["way"] for way in gathers["ways"]]
    assert ways == ["ours", "torch's own", "NCCL and torch.mm", "torch.empty and the kernel"] and gathers["takes"] == str(config)
    assert [way["way"] for way in scatters["ways"]] == ways[:3] and scatters["takes"].startswith("torch's own: no winner")
    assert all(0 < way["p50_us"] <= way["p99_us"] for way in (*gathers["ways"], *scatters["ways"]))


def scripted(name: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs a script, whose last argument is the path of its document. Returns the document and the output."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", str(SCRIPT.parent / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": paths})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(Path(arguments[-1]).read_text()), ended.stdout


def overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # this process goes on
    return importlib.import_module("overhead")


@pytest.mark.parametrize(("budget", "code"), [(-1e6, 1), (1e6, 0)])
def test_the_overhead_script_judges_every_way_of_calling_a_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget: float, code: int
) -> None:
    out, script = tmp_path / "overhead.json", overhead(monkeypatch)
    arguments = ["--backend", "cpu", "--rounds", "20", "--db", str(tmp_path / "none.db"), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["overhead.py", *arguments])
    monkeypatch.setattr(script, "BUDGET_US", budget)
    assert script.main() == code
    document = json.loads(out.read_text())
    assert document["within_budget"] is (code == 0)
    judged = []
    for module in document["modules"]:
        ways = {way["way"]: way for way in module["ways"]}
        assert {name: way["above"] for name, way in ways.items() if "above" in way} == {
            "module, out given": "bare operator",
            "module": "bare operator, output made",
            "torch.ops": "bare operator, output made",
        }
        assert all(way["p50_us"] > 0 for way in ways.values())
        judged += [way["above_p50_us"] for way in ways.values() if "above" in way]
    assert document["worst_above_p50_us"] == max(judged)


def test_an_overhead_is_the_median_difference_within_a_round_of_the_worst_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(slower: float) -> dict[str, Any]:
        bare = [10.0, 500.0, 20.0] * 3  # what is paid in one round alone is no difference
        return {
            "module": "M",
            "takes": "T",
            "times": {"bare operator": bare, "module, out given": [us + slower + i for i, us in enumerate(bare)]},
        }

    bare, module = overhead(monkeypatch).reduce([rank(1.0), rank(3.0)])["ways"]
    assert bare == {"way": "bare operator", "p50_us": 20.0, "p99_us": 500.0}
    assert module["above_p50_us"] == 3.0 + 4
    assert module["above_interval_us"] == [3.0 + 1, 3.0 + 7]
    assert module["above_p99_us"] == 3.0 + 8


def test_every_round_draws_another_order_and_all_ranks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    script, names, called = overhead(monkeypatch), "abcd", []
    ways = {name: functools.partial(called.append, name) for name in names}
    monkeypatch.setattr(script, "ways_of_linear", lambda *_: ("nothing", ways))
    monkeypatch.setattr(script, "ways_of_decode", lambda *_: ("nothing", ways))
    script.measure(None, 50, None)
    both = [called[i : i + 4] for i in range(0, len(called), 4)]
    assert all(sorted(order) == list(names) for order in both)
    assert len({tuple(order) for order in both}) > math.factorial(len(names)) / 2
    assert both[: len(both) // 2] == both[len(both) // 2 :]
