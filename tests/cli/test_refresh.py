"""`autotax refresh`: which winners are proven again, with what, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm, FlashDecode, GemmReduceScatter
from autotax.spaces import space_for
from tests.cli.conftest import GPUS, Ranks, Run, Tuner, keep_winner

PROBLEM = AllGatherGemm(64, 96, 64, "fp32", world_size=2)
WIDER = AllGatherGemm(64, 128, 64, "fp32", world_size=2)
DECODE = FlashDecode(2, 8, 2, 32, 128, "fp32", world_size=2)
SUM = GemmReduceScatter(64, 96, 64, "fp32", world_size=2)
OLD = "3.0.0"


def default(problem: Problem, variant: str) -> Config:
    return space_for(problem, detect("cpu")).default(variant)


@pytest.fixture
def stale(db: Path) -> None:
    """Two stale winners of these devices, one that holds, one of other devices."""
    bsp = default(PROBLEM, "bsp")
    keep_winner(db, PROBLEM, detect("cpu"), default(PROBLEM, "push"), bsp, triton=OLD)
    keep_winner(db, DECODE, detect("cpu"), default(DECODE, "fused"), default(DECODE, "bsp"), triton=OLD)
    keep_winner(db, WIDER, detect("cpu"), default(WIDER, "push"), bsp)
    keep_winner(db, AllGatherGemm(64, 96, 64, world_size=4), GPUS, default(PROBLEM, "push"), bsp, Conditions(), OLD)


@pytest.mark.usefixtures("stale")
def test_proves_what_is_stale_only_in_software(run: Run, tuner: Tuner, ranks: Ranks, db: Path) -> None:
    result = run("refresh", "--soak", 7)
    assert result.code == 0 and {problem for problem, *_ in tuner.proven} == {PROBLEM, DECODE}
    proven = {problem: (configs, settings) for problem, configs, settings in tuner.proven}
    configs, settings = proven[PROBLEM]
    assert configs == (default(PROBLEM, "bsp"), default(PROBLEM, "push")), "the former winner and its BSP"
    assert settings.soak == 7 and settings.conditions == Conditions("eager", "warm")
    assert ranks.started == [2] and ranks.closed == 1, "one pool of ranks"
    assert ranks.expected == [problem for problem, *_ in tuner.proven], "kernels compile while ranks start or measure others"
    assert "push is 1.25x faster than BSP" in result.err and "problem 2 of 2" in result.err
    assert f"stored in {db}; next: autotax winners" in result.err
    assert result.out.count(" kept") == 2


def test_what_others_wrote_may_replace_a_winner(run: Run, tuner: Tuner, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_winner(db, SUM, detect("cpu"), default(SUM, "push"), default(SUM, "bsp"), triton=OLD)
    result = run("refresh", "--json")
    ((_, configs, _),) = tuner.proven
    assert configs == (default(SUM, "bsp"), default(SUM, "push"), Config("all_to_all"))
    assert (result.document["outcome"], result.document["winner"]["variant"]) == ("replaced", "all_to_all")
    tuner.proven.clear()
    monkeypatch.setenv("AUTOTAX_ONLY_OURS", "1")
    assert run("refresh", "--all", "--json").document["outcome"] == "kept"
    assert tuner.proven[0][1] == configs[:2]


@pytest.mark.usefixtures("stale")
def test_all_includes_winners_that_hold_and_names_limit_them(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    run("refresh", "all-gather-gemm", "--all")
    assert {problem for problem, *_ in tuner.proven} == {PROBLEM, WIDER}
    tuner.proven.clear()
    shapes = tmp_path / "shapes.toml"
    shapes.write_text("[[flash-decode]]\nbatch = 2\nq_heads = 8\nkv_heads = 2\nhead_dim = 32\nkv_len = 128\ndtype = 'fp32'\n")
    document = run("refresh", "--shapes", shapes, "--json").document
    assert [problem for problem, *_ in tuner.proven] == [DECODE]
    assert (document["outcome"], document["former"]["variant"]) == ("kept", "fused")
    assert document["former"]["stale"].startswith(f"triton {OLD} (here ") and document["winner"]["variant"] == "fused"


@pytest.mark.usefixtures("stale")
def test_no_further_problem_begins_when_time_is_up(run: Run, tuner: Tuner) -> None:
    result = run("refresh", "--timeout", "0.001")
    assert result.code == 1 and len(tuner.proven) < 2 and "run `autotax refresh` again" in result.err


@pytest.mark.usefixtures("stale")
def test_nothing_verified_is_a_failure(run: Run, tuner: Tuner) -> None:
    tuner.how = "nothing"
    result = run("refresh")
    assert result.code == 1 and "nothing could be verified" in result.err and "failed" in result.out


@pytest.mark.usefixtures("stale")
def test_a_tie_after_a_refresh_is_marked(run: Run, tuner: Tuner) -> None:
    tuner.how = "ties"
    result = run("refresh")
    assert "bsp, a tie" in result.out and "differences are within noise; BSP is kept" in result.err


def test_nothing_stale_is_no_failure(run: Run, tuner: Tuner) -> None:
    result = run("refresh")
    assert result.code == 0 and "nothing to prove" in result.err and not tuner.proven
