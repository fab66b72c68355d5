"""Modules prove stale winners at their construction, on real CPU ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotax.core.conditions import ON_CPU
from autotax.core.errors import UsageError
from autotax.db import Store, TrialRecord, WinnerRecord
from autotax.db.lookup import lookup, reload
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.operators.problems import AllGatherGemm
from autotax.operators.registry import variant_digest
from autotax.runner.ranks import Ranks
from autotax.software import environment
from autotax.spaces import space_for

PROBLEM = AllGatherGemm(32, 32, 32, "fp32", world_size=2)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def keep_stale_winner(db: Path) -> None:
    """A winner of these devices, measured with another Triton."""
    hardware, software = detect("cpu"), replace(environment("cpu"), triton="3.0.0")
    space = space_for(PROBLEM, hardware)
    config = space.default("push")
    with Store.open(db) as store:
        run_id = store.begin_run(PROBLEM, hardware, software, {})
        trial = TrialRecord(0, config, "ok", 80.0, [[80.0], [80.0]], verified=True, conditions=ON_CPU.to_dict())
        store.set_winner(
            WinnerRecord(
                problem=PROBLEM, hardware=hardware, environment=software, conditions=ON_CPU,
                trial_id=store.add_trial(run_id, trial), config=config, latency_us=80.0, baseline_us=100.0,
                baseline=space.default("bsp"), speedup=1.25, interval_low=1.2, interval_high=1.3, tie=False, verified=True,
                kernel_digest=variant_digest(PROBLEM.op, config.variant),
            )
        )  # fmt: skip


def make(world: World, db: Path, prove: bool | float) -> tuple[list[str], str, str]:  # noqa: ARG001 - ranks hand it on
    """Makes a module; returns its warnings, the config it runs, and the answer of a later look-up."""
    import autotax.nn

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = autotax.nn.Tuned(PROBLEM, db=db, prove=prove)
    config = module.choices[0].config
    module.close()
    return [str(each.message) for each in told], str(config), lookup(PROBLEM, hardware=detect("cpu"), db=db).match


@pytest.mark.volume
def test_a_stale_winner_is_proven_when_a_module_is_made(two: Ranks, tmp_path: Path) -> None:
    db = tmp_path / "own.db"
    keep_stale_winner(db)
    reload()
    assert "triton 3.0.0" in lookup(PROBLEM, hardware=detect("cpu"), db=db).reason
    first, second = two.run(make, db, 150, timeout=200)
    assert first == second, "the ranks agree"
    assert first[2] == "exact" and not any("proven" in line for line in first[0])
    with Store.open(db, create=False) as store:
        proven = [winner for winner in store.winners() if winner.environment.triton == environment("cpu").triton]
        again = [trial for trial in store.trials(PROBLEM) if trial.run_id == 2]
    tried = {trial.config.variant: "verified" if trial.verified else trial.error for trial in again}
    assert len(proven) == 1 and proven[0].verified and str(proven[0].config) == first[1]
    assert tried == {"bsp": "verified", "push": "verified"}, "the former winner met BSP again"


def test_time_that_is_up_leaves_a_module_that_works_and_says_why(two: Ranks, tmp_path: Path) -> None:
    db = tmp_path / "own.db"
    keep_stale_winner(db)
    first, second = two.run(make, db, 0.3, timeout=100)
    assert first == second and first[2] == "fallback"
    assert any("could not all be proven within 0.3 s" in line for line in first[0])


def test_what_is_no_time_is_refused_at_once(tmp_path: Path) -> None:
    for wrong in (0, -1, float("inf"), "soon"):
        with pytest.raises(UsageError, match="prove is"):
            lookup(PROBLEM, db=tmp_path / "none.db", prove=wrong)  # type: ignore[arg-type]
