"""Plugins prove stale winners by themselves: at construction, once, within bounds, and never while a graph is captured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from autotax.db import reproof
from autotax.operators.problems import DecodeMerge, GemmReduceScatter
from autotax.runner.ranks import Ranks
from autotax.torch import plans
from tests.engines import checks, stand_ins
from tests.engines.checks import DIM, HEADS, K, N
from tests.nn.test_reproof import keep_stale_winner
from tests.torch.conftest import ranks  # noqa: F401 - the same processes
from tests.torch.winners import WORLD, usual

REDUCED = [GemmReduceScatter(m, N, K // WORLD, "fp32", "replicated", WORLD) for m in (16, 64)]
MERGED = DecodeMerge(8, HEADS, DIM, "fp32", WORLD, "head_scatter")


def stale(path: Path) -> str:
    for problem in REDUCED:
        keep_stale_winner(path, problem, usual(problem, "push"))
    return keep_stale_winner(path, MERGED, usual(MERGED, "gather"))


@pytest.mark.volume
def test_vllm_proves_by_default_what_its_layers_meet_and_does_it_once(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    db = stale(tmp_path / "a.db")
    (lines, begun, sums), (others, none, _) = ranks.run(checks.vllm_proving, db, "7", False)
    assert begun == [problem.key for problem in (*REDUCED, MERGED)], "rank 0 proves those of each layer together"
    proven = [line for line in lines if "stale" in line]
    assert proven[0].startswith("autotax: 2 of 2 stale winners hold again, triton 3.0.0 (here "), proven
    assert ": push 2, in " in proven[0] and ": gather 1, in " in proven[1]
    assert none == [] and not any("stale" in line for line in others) and sums == 0
    for _, begun, sums in ranks.run(checks.vllm_proving, db, "7", False):
        assert begun == [] and sums == 0, "the winners are in the database"


@pytest.mark.parametrize("seconds, captures, said", [("0", False, []), ("7", True, []), ("soon", False, ["AUTOTAX_PROVE_S is"])])
def test_vllm_goes_on_where_nothing_is_to_be_proven(
    ranks: Ranks, tmp_path: Path, seconds: str, captures: bool, said: list[str]  # noqa: F811
) -> None:  # fmt: skip
    for rank, (lines, begun, sums) in enumerate(ranks.run(checks.vllm_proving, stale(tmp_path / "a.db"), seconds, captures)):
        assert begun == [] and sums == 1, "its own sum"
        if rank == 0:
            assert all(any(words in line for line in lines) for words in said), lines


def test_sglang_and_torchtitan_prove_what_torchs_operators_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import autotax.torch
    from autotax.engines import plugin, sglang

    monkeypatch.setattr(plugin, "folder", lambda: tmp_path)
    used: list[plans.Deployment] = []
    monkeypatch.setattr(plans, "use", used.append)
    overrides, layers = ModuleType("torchtitan.config.override"), ModuleType("torchtitan.models.common.dist_gemm")
    overrides.override = lambda **_: lambda function: function  # type: ignore[attr-defined]
    layers.AllGatherFusedFeedForward = ModuleType("a class")  # type: ignore[attr-defined]
    layers.AllGatherFusedFeedForward.Config = None  # type: ignore[attr-defined]
    for module in (overrides, layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    titan = importlib.import_module("autotax.engines.torchtitan")
    try:
        assert titan.tuned("config", "some.db") == "config"
        assert used[-1] == plans.Deployment("some.db", None, True)
        with stand_ins.sglang():
            sglang.register()
        assert used[-1] == plans.Deployment(None, None, True)
    finally:
        autotax.torch.uninstall()
        sys.modules.pop("autotax.engines.torchtitan")
    assert used[-1] == plans.Deployment() and reproof.bound_of(True) == reproof.Bound(reproof.EACH_S, per_problem=True)
