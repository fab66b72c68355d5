"""Problems that programs looked up without finding a winner.

They are counted in memory, stored on request and deleted when the problem is tuned.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import autotax
from autotax.core.conditions import EAGER, Conditions
from autotax.core.errors import UsageError
from autotax.db import Store
from autotax.db import lookup as module
from autotax.db.lookup import lookup
from autotax.db.records import MissRecord
from tests.db.conftest import HARDWARE, PROBLEM, keep_winner
from tests.db.test_lookup import DECODE, here  # noqa: F401

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tallies", {})


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "autotax.db"


def counted(db: Path) -> dict[tuple[str, str], int]:
    with Store.open(db, create=False) as store:
        return {(miss.problem.key, miss.conditions.key): miss.count for miss in store.misses(HARDWARE)}


def test_asking_in_vain_is_counted_by_bucket_and_kept_when_saved(db: Path) -> None:
    before = time.time()
    for m in (500, 500, 510, 512):
        lookup(replace(PROBLEM, m=m), db=db)
    lookup(replace(DECODE, batch=5), db=db, conditions=EAGER)
    assert not db.exists()
    assert autotax.save_misses(db) == 2
    six = replace(DECODE, batch=6)
    assert counted(db) == {(PROBLEM.key, Conditions.usual(on_gpu=True).key): 4, (six.key, EAGER.key): 1}
    with Store.open(db) as store:
        [miss, _] = store.misses(HARDWARE)
        assert before - 1 <= miss.last_asked.timestamp() <= time.time() + 1
        assert store.misses(replace(HARDWARE, count=8)) == []


def test_what_is_saved_is_not_saved_again_and_adds_up(db: Path) -> None:
    for _ in range(3):
        lookup(PROBLEM, db=db)
    assert autotax.save_misses(db) == 1
    assert autotax.save_misses(db) == 0
    lookup(PROBLEM, db=db)
    module.reload()
    lookup(PROBLEM, db=db)
    assert autotax.save_misses(db) == 1
    assert counted(db) == {(PROBLEM.key, Conditions.usual(on_gpu=True).key): 5}


def test_what_is_tuned_is_no_miss(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store, PROBLEM)
        keep_winner(store, replace(PROBLEM, m=1000))
    lookup(PROBLEM, db=db)
    assert lookup(replace(PROBLEM, m=500), db=db).match == "nearest"  # of the representative
    assert autotax.save_misses(db) == 0
    assert lookup(replace(PROBLEM, m=1001), db=db).match == "nearest"  # of another in the bucket: 1024 would serve all
    assert autotax.save_misses(db) == 1
    assert counted(db) == {(replace(PROBLEM, m=1024).key, Conditions.usual(on_gpu=True).key): 1}


def test_misses_belong_to_the_database_that_was_asked(db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup(PROBLEM, db=db)
    assert autotax.save_misses(tmp_path / "other.db") == 0
    assert not (tmp_path / "other.db").exists()
    monkeypatch.setenv("AUTOTAX_DB", str(db))
    assert autotax.save_misses() == 1


def test_misses_that_cannot_be_saved_are_not_lost(db: Path) -> None:
    lookup(PROBLEM, db=db)
    db.write_bytes(b"garbage" * 100)
    with pytest.raises(UsageError, match="not a SQLite database"):
        autotax.save_misses(db)
    db.unlink()
    assert autotax.save_misses(db) == 1


def test_many_programs_may_save_at_once(url: str, at_once: Callable[..., list[int | None]]) -> None:
    Store.open(url).close()

    def save(number: int) -> None:
        with Store.open(url) as store:
            for _ in range(10):
                store.add_misses([MissRecord(replace(PROBLEM, m=m), HARDWARE, EAGER, number, NOW) for m in (64, 512)])

    assert at_once(4, save) == [0] * 4
    with Store.open(url, create=False) as store:
        assert [miss.count for miss in store.misses(HARDWARE)] == [10 * (0 + 1 + 2 + 3)] * 2


ASK = "import autotax; autotax.lookup(autotax.AllGatherGemm(60, 96, 64, 'fp32', world_size=2))"


def program(code: str, db: Path, wanted: str | None) -> subprocess.CompletedProcess[str]:
    variables = {"AUTOTAX_DB": str(db)} | ({"AUTOTAX_MISSES": wanted} if wanted else {})
    environment = {name: value for name, value in os.environ.items() if name != "AUTOTAX_MISSES"} | variables
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_program_saves_them_at_its_end_only_if_told_and_only_where_there_is_a_database(db: Path) -> None:
    def ends_well(wanted: str | None) -> bool:
        ended = program(ASK, db, wanted)
        return (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")

    assert ends_well("1")
    assert not db.exists()
    with Store.open(db):
        pass
    assert ends_well(None)
    kept = "SELECT problem_key, count FROM autotax_miss"
    assert rows(db, kept) == []
    assert ends_well("1")
    assert rows(db, kept) == [("all-gather-gemm/m=64,n=96,k=64,dtype=fp32,shard=m,world_size=2", 1)]


def test_a_program_ends_well_even_if_they_cannot_be_saved(db: Path) -> None:
    with Store.open(db):
        pass
    code = f"{ASK}; open({str(db)!r}, 'wb').write(b'garbage' * 1000)"
    ended = program(code, db, "1")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.startswith("autotax: misses are not saved: ") and ended.stderr.count("\n") == 1


def rows(db: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(db)
    records = connection.execute(query).fetchall()
    connection.close()
    return records
