"""Modules prove stale winners at their construction, on real CPU ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autotax.core.conditions import ON_CPU
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db import Store, reproof
from autotax.db.lookup import lookup, reload
from autotax.db.records import Place
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.operators.problems import AllGatherGemm
from autotax.runner.ranks import Ranks
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner

PROBLEM = AllGatherGemm(32, 32, 32, "fp32", world_size=2)
PUSH = space_for(PROBLEM, detect("cpu")).default("push")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def keep_stale_winner(db: Path, problem: Problem = PROBLEM, config: Config = PUSH, triton: str = "3.0.0") -> str:
    """A winner of these devices, measured with another Triton. Returns its database."""
    with Store.open(db) as store:
        keep_winner(store, problem, config, detect("cpu"), replace(environment("cpu"), triton=triton), ON_CPU)
    return str(db)


def make(world: World, dbs: list[str], prove: bool | float, stub: Any = None) -> tuple[list[str], str]:
    """Makes a module; returns its warnings and the config it runs. `stub` replaces the process that proves."""
    import autotax.nn

    reload()
    stubbed = mock.patch.object(reproof, "_refreshed", stub) if stub else nullcontext()
    with warnings.catch_warnings(record=True) as records, stubbed:
        warnings.simplefilter("always")
        module = autotax.nn.Tuned(PROBLEM, db=dbs[world.rank], prove=prove)
    config = module.choices[0].config
    module.close()
    return [str(record.message) for record in records], str(config)


def make_faulty(world: World, db: str, variant: str) -> tuple[list[str], str]:
    """The same, where the former winner is a variant of tests.nn.former_winners."""
    import autotax

    autotax.load("tests.nn.former_winners")
    if world.rank == 0 and not Path(db).exists():
        keep_stale_winner(Path(db), config=Config(variant))
    return make(world, [db] * 2, True)


def runs_of(db: str) -> list[tuple[str, bool, tuple[str, ...]]]:
    """The status of each run of the problem, whether it was a proof, and its notices; without that of the stale winner."""
    with Store.open(db, create=False) as store:
        return [(run.status, run.settings["proof"], run.notices) for run in store.runs(PROBLEM) if "proof" in run.settings]


@pytest.mark.volume
def test_a_stale_winner_is_proven_when_a_module_is_made(two: Ranks, tmp_path: Path) -> None:
    db = keep_stale_winner(tmp_path / "own.db")
    reload()
    assert "triton 3.0.0" in lookup(PROBLEM, hardware=detect("cpu"), db=db).reason
    first, second = two.run(make, [db] * 2, 150, timeout=200)
    assert first == second, "the ranks agree"
    assert not any("proven" in line for line in first[0])
    with Store.open(db, create=False) as store:
        proven = [winner for winner in store.winners() if winner.environment.triton == environment("cpu").triton]
        again = [trial for trial in store.trials(PROBLEM) if trial.run_id == 2]
    tried = {trial.config.variant: "verified" if trial.verified else trial.error for trial in again}
    assert len(proven) == 1 and proven[0].verified and str(proven[0].config) == first[1]
    assert tried == {"bsp": "verified", "push": "verified"}, "the former winner met BSP again"


@pytest.mark.volume
def test_a_look_up_proves_by_no_code_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = keep_stale_winner(tmp_path / "stale.db")
    (folder := tmp_path / "public").mkdir()
    monkeypatch.chdir(folder)
    (folder / "platformdirs.py").write_text("raise SystemExit('a stranger was here')")
    reload()
    assert lookup(PROBLEM, hardware=detect("cpu"), db=db, prove=100).match == "exact"


@pytest.mark.volume
@pytest.mark.parametrize("variant, expected, status", [("now_wrong", "bsp", "done"), ("now_sleeps", "None", "failed")])
def test_a_former_winner_that_is_wrong_or_hangs_now_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, expected: str, status: str
) -> None:
    monkeypatch.setenv(reproof.VARIABLE, "15" if expected == "None" else "100")
    db = str(tmp_path / "own.db")
    with Ranks(2) as ranks:
        first, second = ranks.run(make_faulty, db, variant, timeout=250)
        assert first == second and first[1].startswith(expected)
        before = runs_of(db)
        assert [(ended, proof) for ended, proof, _ in before] == [(status, True)]
        again = ranks.run(make_faulty, db, variant, timeout=60)
    assert [config for _, config in again] == [first[1]] * 2
    assert runs_of(db) == before, "it is remembered: nothing runs again"


def test_time_that_is_up_leaves_a_module_that_works_and_is_remembered(two: Ranks, tmp_path: Path) -> None:
    db = keep_stale_winner(tmp_path / "own.db")
    for _ in range(2):
        first, second = two.run(make, [db] * 2, 0.3, timeout=100)
        assert first == second and first[1] == "None"
        assert any("the time of 0.3 s was up" in line and "`autotax refresh`" in line for line in first[0]), first
    assert runs_of(db) == [("failed", True, ("the time of 0.3 s was up",))], "it was tried once"


def proven(problems: list[Problem], here: Place, db: str, bound: reproof.Bound) -> str:  # noqa: ARG001
    """Stands in for the process that proves: each problem won again."""
    with Store.open(db) as store:
        for problem in problems:
            keep_winner(store, problem, PUSH, here.hardware, here.software, here.conditions)
    return ""


def forbidden(*_: object) -> str:
    raise AssertionError("a proof was begun")


def test_ranks_whose_databases_differ_are_bulk_synchronous(two: Ranks, tmp_path: Path) -> None:
    stale, current = keep_stale_winner(tmp_path / "a.db"), keep_stale_winner(tmp_path / "b.db", triton=environment("cpu").triton)
    none = str(tmp_path / "none.db")
    # Rank 0 proves for its own database alone.
    for dbs, stub in (([stale, none], proven), ([current, keep_stale_winner(tmp_path / "c.db")], forbidden)):
        first, second = two.run(make, dbs, True, stub, timeout=100)
        assert first == second and first[1] == "None"
        assert any("give all ranks the same database" in line for line in first[0]), first
    assert [config for _, config in two.run(make, [stale] * 2, True, forbidden)] == [str(PUSH)] * 2


def test_what_is_no_time_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (0, -1, float("inf"), "soon"):
        with pytest.raises(UsageError, match="prove is"):
            lookup(PROBLEM, db=tmp_path / "none.db", prove=wrong)  # type: ignore[arg-type]
    for text, bound in (("", 10.0), ("2.5", 2.5), ("0", None), ("off", None)):
        monkeypatch.setenv(reproof.VARIABLE, text)
        assert reproof.bound_of(True) == (bound and reproof.Bound(bound, per_problem=True))
    monkeypatch.setenv(reproof.VARIABLE, "soon")
    with pytest.raises(UsageError, match="AUTOTAX_PROVE_S is 'soon'"):
        lookup(PROBLEM, db=tmp_path / "none.db", prove=True)
