"""A database of an older schema: upgraded once and whole by who writes, left as it is by who reads."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Connection, MetaData, create_engine
from sqlalchemy.exc import IntegrityError

from autotax import spaces
from autotax.conditions import EAGER, ON_CPU, Conditions
from autotax.db import RunRecord, Store, TrialRecord, index, lookup, migrations, released, resolve_url
from autotax.db.lookup import reload
from autotax.db.url import sqlite_path
from autotax.errors import UsageError
from autotax.hardware import Hardware
from autotax.problem import AllGatherGemm, FlashDecode
from tests.db.conftest import BSP, ENVIRONMENT, HARDWARE, PROBLEM, PUSH, a_trial, a_winner, keep_winner, snapshot, wipe

V1 = (Path(__file__).parent / "v1.sql").read_text()
PUBLISHED = Path(__file__).parents[2] / "results" / "h200x4" / "main-job" / "tuned.db"
CPU = replace(HARDWARE, backend="cpu", device="x86_64")
NOW = datetime(2026, 1, 2, 3, 4, 5)
ON_DISK = {"mode": "graph", "clock": "device", "l2": "rotated inputs"}
ON_DISK_CPU = {"mode": "eager", "clock": "wall", "l2": "as found"}


def make_v1(url: str) -> None:
    """Two runs, one on GPUs and one on CPU ranks, each with a winner; the first has a trial that failed, too."""
    if path := sqlite_path(url):
        path.parent.mkdir(exist_ok=True)
    engine = create_engine(url)
    on_server = engine.dialect.name == "postgresql"
    spelt = {"SERIAL": "SERIAL", "MOMENT": "TIMESTAMP", "REAL": "DOUBLE PRECISION"}
    plain = {"SERIAL": "INTEGER", "MOMENT": "DATETIME", "REAL": "DOUBLE"}
    with engine.begin() as connection:
        for statement in V1.format(**(spelt if on_server else plain)).split(";\n"):
            connection.exec_driver_sql(statement)
        fill_v1(connection)
    engine.dispose()


def fill_v1(connection: Connection) -> None:
    tables = MetaData()
    tables.reflect(connection)

    def add(table: str, **values: object) -> None:
        connection.execute(tables.tables[f"autotax_{table}"].insert().values(values))

    add("problem", key=PROBLEM.key, op="all-gather-gemm", fields=PROBLEM.to_dict())
    add("environment", digest=ENVIRONMENT.digest, **asdict(ENVIRONMENT))
    for hardware, conditions in ((HARDWARE, ON_DISK), (CPU, ON_DISK_CPU)):
        where = {"problem_key": PROBLEM.key, "hardware_digest": hardware.digest, "environment_digest": ENVIRONMENT.digest}
        config = {"variant": PUSH.variant, "config": PUSH.to_dict(), "config_digest": PUSH.digest}
        add("hardware", digest=hardware.digest, **asdict(hardware))
        run = 1 if hardware is HARDWARE else 2
        add("run", **where, settings={"trials": 2}, status="done", started_at=NOW, ended_at=NOW)
        measured = asdict(replace(a_trial(), conditions=conditions))
        kept = {name: measured[name] for name in measured if name not in ("config", "kernel_digest", "id", "created_at", "run")}
        add("trial", run_id=run, **config, **kept, created_at=NOW)
        won = asdict(a_winner(run))
        for name in ("problem", "hardware", "environment", "kernel_digest", "conditions", "created_at"):
            won.pop(name)
        won |= {"config": PUSH.to_dict(), "baseline": BSP.to_dict(), "created_at": NOW + timedelta(minutes=run)}
        add("winner", **where, kernel_digest=ENVIRONMENT.kernels, world_size=4, comm=ENVIRONMENT.comm, **won)
    failed = {"status": "hang", "verified": False, "error": "rank 1 waited", "conditions": {}}
    add("trial", run_id=1, number=1, **config, **failed, created_at=NOW)


def is_what_v1_held(store: Store) -> None:
    assert store.winners() == [
        a_winner(1, conditions=Conditions(), kernel_digest=ENVIRONMENT.kernels),
        a_winner(2, hardware=CPU, conditions=ON_CPU, kernel_digest=ENVIRONMENT.kernels),
    ]
    assert {trial.kernel_digest for trial in store.trials()} == {ENVIRONMENT.kernels}
    graph, eager = {"mode": "graph", "l2": "cold", "skew_us": 0.0}, {"mode": "eager", "l2": "warm", "skew_us": 0.0}
    assert store.trials() == [
        a_trial(conditions=graph | {"clock": "device"}),
        a_trial(conditions=eager | {"clock": "wall"}),
        TrialRecord(1, PUSH, "hang", error="rank 1 waited", conditions=graph),
    ]
    moment = NOW.replace(tzinfo=UTC)
    assert store.runs() == [
        RunRecord(number, PROBLEM, hardware, ENVIRONMENT, {"trials": 2}, "done", moment, moment, (), {})
        for number, hardware in ((1, HARDWARE), (2, CPU))
    ]


def described(url: str) -> dict[str, Any]:
    """The autotax tables as the database itself describes them."""
    engine = create_engine(url)
    see = sqlalchemy.inspect(engine)

    def in_order(found: list[Any]) -> list[str]:
        return sorted(str(sorted(each.items(), key=str)) for each in found)

    tables = {
        name: {
            "columns": in_order(see.get_columns(name)),
            "key": see.get_pk_constraint(name),
            "foreign": in_order(see.get_foreign_keys(name)),
            "checks": in_order(see.get_check_constraints(name)),
            "indexes": in_order(see.get_indexes(name)),
        }
        for name in see.get_table_names()
    }
    engine.dispose()
    return tables


def test_an_upgraded_database_is_as_a_new_one(url: str) -> None:
    Store.open(url).close()
    new = described(url)
    assert len(new) == 8
    wipe(url)
    make_v1(url)
    assert described(url) != new
    Store.open(url).close()
    assert described(url) == new


@pytest.mark.parametrize(("version", "tables"), [(2, 7), (3, 8)])
def test_versions_between_are_upgraded_too(url: str, monkeypatch: pytest.MonkeyPatch, version: int, tables: int) -> None:
    Store.open(url).close()
    new = described(url)
    wipe(url)
    make_v1(url)
    engine = create_engine(url)
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", version)
    with engine.begin() as connection:
        migrations.upgrade(connection, 1)
    monkeypatch.undo()
    old = described(url)
    engine.dispose()
    assert old != new and len(old) == tables
    with Store.open(url) as store:
        is_what_v1_held(store)
        assert store.misses(HARDWARE) == []
    assert described(url) == new


def test_what_was_tuned_with_sources_that_were_published_names_those_of_its_variant(url: str) -> None:
    make_v1(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        for change in ("environment SET kernels =", "winner SET kernel_digest ="):
            connection.exec_driver_sql(f"UPDATE autotax_{change} '{released.ALL_SOURCES}'")
        connection.exec_driver_sql("UPDATE autotax_trial SET variant = 'plugin' WHERE number = 1")
    engine.dispose()
    of_push = released.VARIANTS[PROBLEM.op, "push"]
    with Store.open(url) as store:
        assert [winner.kernel_digest for winner in store.winners()] == [of_push] * 2
        assert [trial.kernel_digest for trial in store.trials()] == [of_push, of_push, released.ALL_SOURCES]


def test_triton_is_part_of_a_winners_key(store: Store) -> None:
    newer = replace(ENVIRONMENT, triton="3.7.1")
    first, second = keep_winner(store), keep_winner(store, environment=newer)
    assert store.winners() == [first, second]


def test_what_an_older_database_held_is_there_and_it_goes_on(url: str) -> None:
    make_v1(url)
    for _ in range(2):
        with Store.open(url) as store:
            is_what_v1_held(store)
    with Store.open(url) as store:
        trial = store.add_trial(1, a_trial(conditions=EAGER.to_dict()))
        store.set_winner(a_winner(trial, conditions=EAGER))
        assert [winner.conditions for winner in store.winners()] == [Conditions(), ON_CPU, EAGER]
        with pytest.raises(IntegrityError):
            store.add_trial(12345, a_trial())


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_who_only_reads_an_older_file_sees_it_upgraded_and_leaves_it_alone(tmp_path: Path, journal: str) -> None:
    path = tmp_path / "autotax.db"
    make_v1(resolve_url(path))
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.close()
    before = snapshot(tmp_path)
    with Store.open(path, create=False) as store:
        assert store.exists
        is_what_v1_held(store)
        with pytest.raises(RuntimeError, match="create=True"):
            store.end_run(1, "done")
    assert snapshot(tmp_path) == before
    assert list(before) == [str(path)]


@pytest.mark.parametrize("url", ["server"], indirect=True)
def test_who_only_reads_an_older_server_is_told_to_upgrade_it(url: str) -> None:
    make_v1(url)
    with pytest.raises(UsageError, match="older schema") as caught:
        Store.open(url, create=False)
    assert "\n" not in str(caught.value)


def test_a_copy_is_kept_and_none_replaces_another(tmp_path: Path) -> None:
    path, first, second = (tmp_path / name for name in ("tuned.db", "tuned.db.v1.bak", "tuned.db.v1.2.bak"))
    make_v1(resolve_url(path))
    path.chmod(0o600)
    Store.open(path).close()
    assert set(tmp_path.iterdir()) == {path, first}
    assert first.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(first) as connection:
        assert connection.execute("SELECT value FROM autotax_meta").fetchall() == [("1",)]
    connection.close()
    with Store.open(first, create=False) as store:
        is_what_v1_held(store)

    kept = first.read_bytes()
    shutil.copy(first, path)
    Store.open(path).close()
    assert set(tmp_path.iterdir()) == {path, first, second}
    assert first.read_bytes() == kept


def test_an_upgrade_that_fails_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "autotax.db"
    make_v1(resolve_url(path))
    before = snapshot(tmp_path)
    whole = migrations._STEPS[2]

    def cut_short(operations: Any) -> None:
        whole(operations)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setitem(migrations._STEPS, 2, cut_short)
    with pytest.raises(UsageError, match="disk is full"):
        Store.open(path)
    assert snapshot(tmp_path) == before
    monkeypatch.undo()
    with Store.open(path) as store:
        is_what_v1_held(store)


def test_an_upgrade_that_is_killed_is_made_good_by_the_next(tmp_path: Path, at_once: Callable[..., list[int]]) -> None:
    path = tmp_path / "autotax.db"
    make_v1(resolve_url(path))
    whole = migrations._STEPS[2]

    def killed_at_the_end(_: int) -> None:
        def step(operations: Any) -> None:
            whole(operations)
            os.kill(os.getpid(), signal.SIGKILL)

        migrations._STEPS[2] = step
        Store.open(path)

    assert at_once(1, killed_at_the_end) == [-signal.SIGKILL]
    with Store.open(path, create=False) as store:
        is_what_v1_held(store)
    with Store.open(path) as store:
        is_what_v1_held(store)


def test_of_many_that_open_at_once_one_upgrades(tmp_path: Path, at_once: Callable[..., list[int]]) -> None:
    path = tmp_path / "autotax.db"
    make_v1(resolve_url(path))

    def open_it(_: int) -> None:
        with Store.open(path) as store:
            is_what_v1_held(store)

    assert at_once(6, open_it) == [0] * 6
    assert set(tmp_path.iterdir()) == {path, path.with_name("autotax.db.v1.bak")}


@pytest.mark.parametrize("create", [False, True])
def test_published_winners_answer(tmp_path: Path, create: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(PUBLISHED, tmp_path))
    with Store.open(path, create=create) as store:
        assert store.counts() == {"runs": 4, "trials": 142, "winners": 2}
        assert {Conditions.from_dict(trial.conditions) for trial in store.trials()} == {Conditions()}
        winners = store.winners()
    monkeypatch.setattr(lookup, "environment", lambda _: winners[0].environment)
    monkeypatch.setattr(index, "variant_digest", lambda *_: winners[0].environment.kernels)
    monkeypatch.setattr(spaces, "space_for", FirstVariant)
    reload()
    gemm = AllGatherGemm(m=512, n=7168, k=8192, world_size=4)
    decode = FlashDecode(batch=1, q_heads=64, kv_heads=8, head_dim=128, kv_len=32768, world_size=4)
    for problem, variant in ((gemm, "push"), (decode, "single")):
        answer = lookup.lookup(problem, hardware=winners[0].hardware, db=path)
        assert (answer.match, answer.variant) == ("exact", variant)
    eager = lookup.lookup(gemm, hardware=winners[0].hardware, db=path, conditions=EAGER)
    assert eager.match == "fallback"
    reload()


class FirstVariant:
    """A space that admits all and whose bulk-synchronous config is BSP."""

    def __init__(self, problem: object, hardware: Hardware) -> None: ...

    def why_not(self, config: object) -> None: ...

    def default(self, variant: str) -> object:
        assert variant == "bsp"
        return BSP
