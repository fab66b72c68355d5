"""Winners of other software hold where their kernels compile to the machine code that was proven; others are proven again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest

import autotax
from autotax.cli import app
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store, reproof, shipped
from autotax.db.formats import read
from autotax.db.lookup import lookup, reload
from autotax.db.records import Entry, same_kernel
from autotax.heap.world import World
from autotax.kernels.offline import resources_offline
from autotax.kernels.resources import machine_code
from autotax.operators.problems import HeadGather
from autotax.runner.ranks import Ranks as Processes
from autotax.software import environment, triton_version
from autotax.spaces import space_for
from autotax.testing.examples import Examples
from autotax.tuner import equal_code
from tests.cli.conftest import GPUS, Ranks, Run, Tuner, on_machine

PROBLEM, OTHER = (HeadGather(rows, 8, 128, world_size=2) for rows in (16, 32))
USUAL = Conditions.usual(on_gpu=True)
PATIENCE_S = 300.0
SAMPLE_STEP = 20


@pytest.fixture(scope="module")
def config() -> Config:
    return space_for(PROBLEM, GPUS).default("words")


@pytest.fixture(scope="module")
def code(config: Config) -> str:
    digest = machine_code(resources_offline(PROBLEM, config, GPUS))
    assert digest
    return digest


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers start slowly on loaded machines."""
    monkeypatch.setattr(equal_code, "START_S", PATIENCE_S)


def keep(db: Path | str, config: Config, code: str | None, problem: Problem = PROBLEM) -> None:
    """A winner of these devices, measured with an older Triton."""
    examples = Examples(problem, space_for(problem, GPUS).default("bsp"), config, config)
    old = replace(environment("cuda"), triton="3.0.0")
    winner = examples.winner(0, hardware=GPUS, environment=old, conditions=USUAL, machine_code=code, created_at=datetime.now(UTC))
    with Store.open(db) as store:
        store.merge([Entry(winner)], "a test")


def test_a_winner_of_equal_machine_code_holds_without_ranks_and_is_remembered(
    run: Run, tuner: Tuner, ranks: Ranks, db: Path, config: Config, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, GPUS)
    keep(db, config, code)
    assert lookup(PROBLEM, hardware=GPUS, db=db).match == "fallback"
    result = run("refresh")
    assert result.code == 0 and "1 of 1 stale winners hold: their kernels compile to equal machine code" in result.err
    assert tuner.proven == [] and ranks.started == []
    reload()
    answer = lookup(PROBLEM, hardware=GPUS, db=db)
    assert (answer.match, answer) == ("exact", config)
    with mock.patch.object(equal_code, "CompileAhead", side_effect=AssertionError("compiled again")):
        assert "nothing to prove" in run("refresh").err


@pytest.mark.parametrize("kept", ["0123456789abcdef", None])
def test_other_or_unknown_machine_code_is_proven(
    run: Run, tuner: Tuner, db: Path, config: Config, monkeypatch: pytest.MonkeyPatch, kept: str | None
) -> None:
    on_machine(monkeypatch, GPUS)
    keep(db, config, kept)
    unknown = mock.patch.object(equal_code, "CompileAhead", side_effect=AssertionError("nothing to compare with"))
    with unknown if kept is None else mock.patch.object(equal_code, "MOST_COMPILERS", 1):
        result = run("refresh")
    assert result.code == 0 and [problem for problem, *_ in tuner.proven] == [PROBLEM] and "equal machine code" not in result.err


def test_only_what_compiles_in_time_and_is_not_asked_for_holds(
    run: Run, tuner: Tuner, db: Path, config: Config, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, GPUS)
    keep(db, config, code)
    monkeypatch.setattr(equal_code, "START_S", -equal_code.EACH_S)
    assert run("refresh").code == 0 and len(tuner.proven) == 1, "no time was left"
    monkeypatch.setattr(equal_code, "START_S", PATIENCE_S)
    assert run("refresh", "--all").code == 0 and len(tuner.proven) == 2, "a measurement was asked for"
    notices: list[str] = []
    assert autotax.refresh(db=db, on_notice=notices.append) == [] and notices[0].startswith("1 of 1 stale winners hold")


def proving(world: World, db: str) -> tuple[str, str, int]:
    """Proves as a layer does at construction; `autotax refresh` runs in this process, on a stand-in for GPUs."""
    from autotax.nn.consensus import prove_first

    begun: list[Sequence[str]] = []

    def in_process(command: Sequence[str], variables: dict[str, str], seconds: float) -> str:  # noqa: ARG001
        begun.append(command)
        with mock.patch.dict(os.environ, variables):
            return "" if app.main(list(command[command.index("autotax") + 1 :])) == 0 else "failed"

    with pytest.MonkeyPatch.context() as patches:
        on_machine(patches, GPUS)
        patches.setattr(equal_code, "START_S", PATIENCE_S)
        patches.setattr(reproof, "_run", in_process)
        reload()
        note = prove_first(world, [PROBLEM, OTHER], GPUS, USUAL, db, PATIENCE_S)
        return note, str(lookup(PROBLEM, hardware=GPUS, db=db)), len(begun)


def test_ranks_agree_on_a_winner_of_equal_machine_code(tmp_path: Path, config: Config, code: str) -> None:
    db = str(tmp_path / "a.db")
    keep(db, config, code)
    with Processes(2) as two:
        first, second = two.run(proving, db, timeout=PATIENCE_S)
        assert first == ("", str(config), 1) and second == ("", str(config), 0), "rank 0 alone compiles"
        assert [begun for *_, begun in two.run(proving, db, timeout=PATIENCE_S)] == [0, 0], "it is in the database"


def test_files_and_databases_keep_machine_code_and_may_lack_it(
    run: Run, db: Path, config: Config, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, GPUS)
    keep(db, config, code)
    keep(db, config, None, OTHER)
    run("export", "--output", tmp_path / "a.json")
    assert [entry.winner.machine_code for entry in read(tmp_path / "a.json")] == [code, None]
    assert (tmp_path / "a.json").read_text().count("machine_code") == 1, "as before where it is unknown"
    run("import", tmp_path / "a.json", "--db", tmp_path / "b.db")
    with Store.open(tmp_path / "b.db", create=False) as store:
        assert [winner.machine_code for winner in store.winners(with_samples=False)] == [code, None]
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace(code, code * 2))
    assert "malformed" in run("import", tmp_path / "a.json").complaint


@pytest.mark.skipif(triton_version() != "3.6.0", reason="shipped winners were proven with Triton 3.6.0")
def test_shipped_machine_code_is_that_of_the_triton_that_proved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", Path(autotax.__file__).parent / "shipped")
    hold = [winner for winner in shipped.winners() if winner.machine_code and same_kernel(winner)]
    for winner in [*{winner.config.variant: winner for winner in hold}.values(), *hold[::SAMPLE_STEP]]:
        assert machine_code(resources_offline(winner.problem, winner.config, winner.hardware)) == winner.machine_code, winner
