"""export, import, tune --misses and lookup --allow-stale, as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.db.records import MissRecord
from autotax.hardware import Hardware, detect
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.spaces import space_for
from tests.cli.conftest import BSP, GPUS, PUSH, Run, Tuner, keep_winner
from tests.cli.test_bad_input import assert_nothing_happened
from tests.edits import edited

GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64", "--dtype", "fp32"]
PROBLEM = AllGatherGemm(64, 96, 64, "fp32", world_size=2)
DECODE = FlashDecode(2, 8, 2, 32, 128, "fp32", world_size=2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "winners.json"


# export and import


def test_winners_go_from_one_database_to_another(run: Run, db: Path, tmp_path: Path, file: Path) -> None:
    push = space_for(PROBLEM, detect("cpu")).default("push")
    keep_winner(db, PROBLEM, detect("cpu"), push, BSP)
    keep_winner(db, DECODE, GPUS, BSP, BSP)
    result = run("export", "-o", file)
    assert result.code == 0 and "2 winners" in result.out
    other = tmp_path / "other.db"
    taken = run("import", file, "--db", other)
    assert taken.code == 0 and "2 winners" in taken.out and "2 added" in taken.out
    assert run("lookup", *GEMM, "--db", other, "--json").document["match"] == "exact"
    again = run("import", file, "--db", other, "--json").whole
    assert [(winner["outcome"], winner["reason"]) for winner in again["results"]] == [("kept", "it is the same")] * 2
    assert again["about"]["file"] == str(file)
    trials = run("trials", *GEMM, "--db", other)
    assert trials.code == 0 and "push" in trials.out


def test_an_export_says_which_winners_are_stale_here(run: Run, db: Path, file: Path) -> None:
    keep_winner(db, PROBLEM, detect("cpu"), PUSH, BSP)
    keep_winner(db, DECODE, GPUS, BSP, BSP)
    assert "stale" not in run("export", "-o", file).out
    with edited("kernels/all_gather_gemm/push.py"):
        result = run("export", "-o", file)
    marked = [line for line in result.out.splitlines() if line.rstrip().endswith(" stale")]
    assert "2 winners" in result.out and len(marked) == 1 and "kernel sources" in result.out
    assert "stale" not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "ops"),
    [
        ([], ["all-gather-gemm", "flash-decode"]),
        (["flash-decode"], ["flash-decode"]),
        (["flash-decode", "all-gather-gemm"], ["all-gather-gemm", "flash-decode"]),
        (["--backend", "cuda"], ["flash-decode"]),
    ],
)
def test_a_part_can_be_exported(run: Run, db: Path, file: Path, arguments: list[str], ops: list[str]) -> None:
    keep_winner(db, PROBLEM, detect("cpu"), PUSH, BSP)
    keep_winner(db, DECODE, GPUS, BSP, BSP)
    winners = run("export", *arguments, "--output", file, "--json").results
    assert sorted(winner["problem"]["op"] for winner in winners) == ops
    assert sorted(winner["problem"]["op"] for winner in json.loads(file.read_text())["winners"]) == ops


def test_an_anonymous_export_does_not_say_who(run: Run, db: Path, file: Path) -> None:
    keep_winner(db, PROBLEM, GPUS, PUSH, BSP)
    run("export", "-o", file)
    document = json.loads(file.read_text())
    assert "@" in document["exported_by"] and "@" in document["winners"][0]["tuned_by"]
    run("export", "-o", file, "--anonymous")
    document = json.loads(file.read_text())
    assert document["exported_by"] is None and document["winners"][0]["tuned_by"] is None


def test_a_conflict_is_told_with_its_reason(run: Run, db: Path, file: Path) -> None:
    keep_winner(db, PROBLEM, GPUS, PUSH, BSP)
    run("export", "-o", file)
    document = json.loads(file.read_text())
    document["winners"][0]["interval"] = [1.25, 1.3]
    file.write_text(json.dumps(document))
    result = run("import", file)
    assert "1 replaced" in result.out and "its speed-up is at least 1.25x" in result.out
    document["winners"][0]["interval"] = [1.1, 1.3]
    file.write_text(json.dumps(document))
    assert run("import", file, "--json").document["outcome"] == "kept"
    with Store.open(db, create=False) as store:
        assert [winner.interval_low for winner in store.winners()] == [1.25]


BAD = {
    "an operator of nobody": ["export", "-o", "FILE", "all-reduce"],
    "no file to write": ["export"],
    "a folder that is not there": ["export", "-o", "FILE/x/y.json"],
    "a folder as the file to write": ["export", "-o", "."],
    "the root as the file to write": ["export", "-o", "/"],
    "a file below a file": ["export", "-o", f"{__file__}/x.json"],
    "a name too long": ["export", "-o", "FILE" + "x" * 300],
    "nothing to export": ["export", "-o", "FILE", "--db", "NONE"],
    "an unknown backend to export": ["export", "-o", "FILE", "--backend", "tpu"],
    "no file to read": ["import"],
    "a file that is not there": ["import", "FILE"],
    "an unknown backend to import": ["import", "FILE", "--backend", "tpu"],
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_bad_input(run: Run, db: Path, tmp_path: Path, file: Path, arguments: list[str], form: list[str]) -> None:
    keep_winner(db, PROBLEM, GPUS, PUSH, BSP)
    before = sorted(tmp_path.rglob("*"))
    spelt = [argument.replace("FILE", str(file)).replace("NONE", str(tmp_path / "none.db")) for argument in arguments]
    assert run(*spelt, *form).complaint
    assert sorted(tmp_path.rglob("*")) == before


def test_a_foreign_file_is_one_line_and_nothing_is_made(run: Run, tuner: Tuner, db: Path, file: Path) -> None:
    file.write_text('{"format": "another"}')
    assert "not an export of autotax" in run("import", file).complaint
    assert_nothing_happened(tuner, db)


# tune --misses


def keep_misses(db: Path, *asked: tuple[Problem, int, Conditions], hardware: Hardware | None = None) -> None:
    now = datetime.now(UTC)
    with Store.open(db) as store:
        store.add_misses([MissRecord(problem, hardware or detect("cpu"), how, count, now) for problem, count, how in asked])


def left(db: Path) -> list[Problem]:
    with Store.open(db, create=False) as store:
        return [miss.problem for miss in store.misses(detect("cpu"))]


SKEWED = replace(ON_CPU, skew_us=40.0)


def test_misses_are_tuned_most_asked_first_as_they_were_asked_for(run: Run, tuner: Tuner, db: Path) -> None:
    keep_misses(db, (PROBLEM, 3, SKEWED), (DECODE, 9, ON_CPU))
    keep_misses(db, (replace(PROBLEM, m=1), 99, ON_CPU), hardware=replace(detect("cpu"), count=999))
    result = run("tune", "--misses", "--trials", 5, "--json")
    assert result.code == 0
    assert [(problem, settings.conditions, settings.trials) for problem, settings in tuner.asked] == [
        (DECODE, ON_CPU, 5),
        (PROBLEM, SKEWED, 5),
    ]
    assert [row["problem"] for row in result.results] == [DECODE.to_dict(), PROBLEM.to_dict()]
    assert left(db) == [] and not tuner.compared
    repeat = run("tune", "--misses")
    assert (repeat.code, repeat.out) == (0, "") and "nothing to tune" in repeat.err
    assert run("tune", "--misses", "--json").results == []


@pytest.mark.parametrize(("how", "code"), [("nothing", 1), ("interrupted", 130)])
def test_what_was_not_tuned_stays_a_miss(run: Run, tuner: Tuner, db: Path, how: str, code: int) -> None:
    keep_misses(db, (DECODE, 3, ON_CPU))
    tuner.how = how
    assert run("tune", "--misses").code == code
    assert left(db) == [DECODE]


@pytest.mark.usefixtures("tuner")
def test_whatever_is_tuned_is_no_miss_any_more(run: Run, db: Path) -> None:
    keep_misses(db, (PROBLEM, 1, SKEWED), (PROBLEM, 2, ON_CPU))
    run("tune", *GEMM)
    with Store.open(db, create=False) as store:
        assert [miss.conditions for miss in store.misses(detect("cpu"))] == [SKEWED]


def test_a_miss_that_cannot_be_tuned_here_is_told_and_left(run: Run, tuner: Tuner, db: Path) -> None:
    huge = AllGatherGemm(2**30, 4096, 4096, world_size=2)
    keep_misses(db, (huge, 7, ON_CPU), (DECODE, 3, ON_CPU))
    result = run("tune", "--misses")
    assert result.code == 0 and "looked up 7 times and is left out" in result.err
    assert [problem for problem, _ in tuner.asked] == [DECODE]
    assert left(db) == [huge]


@pytest.mark.parametrize("more", [GEMM, ["--m", "64"], ["--shapes", "x.toml"], ["--mode", "eager"], ["--skew", "3"]])
def test_misses_bring_their_own_problems_and_conditions(run: Run, tuner: Tuner, db: Path, more: list[str]) -> None:
    assert "--misses" in run("tune", "--misses", *more).complaint
    assert_nothing_happened(tuner, db)


def test_no_database_has_no_misses_and_is_not_made(run: Run, tuner: Tuner, db: Path) -> None:
    assert "nothing to tune" in run("tune", "--misses").err
    assert not db.exists() and not tuner.asked


# lookup --allow-stale


def test_a_stale_winner_answers_if_allowed(run: Run, db: Path) -> None:
    push = space_for(PROBLEM, detect("cpu")).default("push")
    keep_winner(db, PROBLEM, replace(detect("cpu"), memory_gib=7), push, BSP)
    strict = run("lookup", *GEMM, "--json").document
    assert strict["match"] == "fallback" and "is stale: memory 7 GiB (here" in strict["reason"]
    document = run("lookup", *GEMM, "--allow-stale", "--json").document
    assert (document["match"], Config.of(document["variant"], document["config"])) == ("stale", push)
    assert "memory 7 GiB (here" in document["reason"]
