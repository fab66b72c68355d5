"""Valid files and rows with one value changed, drawn by hypothesis: each is read correctly or refused in one line."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotax.core.conditions import ON_CPU
from autotax.core.errors import UsageError
from autotax.db import Store, formats, shipped
from autotax.db.lookup import lookup, reload
from autotax.db.records import MissRecord
from autotax.operators import operators, problem_from_dict
from autotax.operators.problem_files import read_shapes
from autotax.report import ladder
from autotax.report import taxes as compared
from autotax.report.page import page
from results.search import landscapes
from tests.db.conftest import HARDWARE, PROBLEM, keep_winner
from tests.db.test_exchange import an_entry
from tests.db.test_lookup import here  # noqa: F401
from tests.report.test_ladder import DOCUMENTS

pytestmark = pytest.mark.usefixtures("one_renderer")
SAMPLE, VOLUME = 20, 600
AMOUNTS = [SAMPLE, pytest.param(VOLUME, marks=pytest.mark.volume)]
WRONG = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 32.0, 0.5, -0.0, 1e14, 1e300, float("nan"), "", "x", "32", "ok", "\0",
    "\x1b[31m", "[red]x[/red]", "\ud800", "x" * 5000, "1e999", "2026-01-02", [], [1], [[]], {}, {"op": 1}, b"\xff\x00",
]  # fmt: skip
ALL = (list(operators()), ["cuda", "rocm", "cpu"])
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def changed(document: Any, data: st.DataObject) -> Any:
    """A copy with one value, at any depth, replaced, removed or extended."""
    document = copy.deepcopy(document)
    at: Any = [document]
    key: Any = 0
    while isinstance(at[key], dict | list) and at[key] and data.draw(st.integers(0, 7)):
        at = at[key]
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
    how = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
    if how == "remove" and at[key] is not document:
        del at[key]
    elif how == "add" and isinstance(at[key], dict):
        at[key]["unknown\x1b[1m"] = 1
    else:
        at[key] = data.draw(st.sampled_from([value for value in WRONG if not isinstance(value, bytes)]))
        if at[key] != at[key] or len(at) == 0:
            return document
        document = at[key] if at is not document and key == 0 and not isinstance(document, dict | list) else document
    return document


def many(amount: int) -> Callable[[Any], Any]:
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=amount, deadline=None, suppress_health_check=quiet, database=None, derandomize=amount <= SAMPLE)


def check_message(error: UsageError) -> None:
    """Checks that an error is one line without control characters."""
    message = str(error)
    assert "\n" not in message and message.isprintable() and len(message) < 1200, message


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


# Files


@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_winners_file(tmp_path: Path, amount: int) -> None:
    file, db = tmp_path / "winners.json", tmp_path / "autotax.db"
    formats.write(file, [an_entry(), an_entry(problem=replace(PROBLEM, m=64))])
    good = json.loads(file.read_text())
    refused = 0

    @many(amount)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal refused
        file.write_bytes(as_json(changed(good, data)))
        try:
            entries = formats.read(file)
        except UsageError as error:
            refused += 1
            check_message(error)
        else:
            db.unlink(missing_ok=True)
            with Store.open(db) as store:
                store.merge(entries, "a file")
                assert len(store.entries(*ALL)) <= len(entries)

    check()
    assert refused > amount / 4


def test_a_text_that_is_too_long_is_refused_in_a_short_line(tmp_path: Path) -> None:
    """In whatever field of a winner: a message does not repeat thousands of characters."""
    file = tmp_path / "winners.json"
    formats.write(file, [an_entry()])
    (good,) = json.loads(file.read_text())["winners"]
    inner = [(name, key, value) for name, of in good.items() if isinstance(of, dict) for key, value in of.items()]
    places = [tuple(path) for *path, value in [*good.items(), *inner] if isinstance(value, str)]
    for *above, last in places:
        changed_one = copy.deepcopy(good)
        (changed_one[above[0]] if above else changed_one)[last] = "x" * 5000
        file.write_text(json.dumps({**json.loads(file.read_text()), "winners": [changed_one]}))
        with pytest.raises(UsageError) as refused:
            formats.read(file)
        check_message(refused.value)
    assert len(places) > 10


@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_comparison(tmp_path: Path, amount: int) -> None:
    file = tmp_path / "compare.json"
    refused = 0

    @many(amount)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal refused
        file.write_bytes(as_json(changed(DOCUMENTS, data)))
        try:
            documents = compared.read(file)
        except UsageError as error:
            refused += 1
            check_message(error)
        else:
            page("a database", NOW, [], [], documents)
            if ladders := ladder.of(documents):
                ladder.table(ladders)
                assert len(ladder.plot(ladders)) < 100_000

    check()
    assert refused > amount / 4


@pytest.mark.parametrize("amount", AMOUNTS)
def test_landscapes(tmp_path: Path, amount: int) -> None:
    file, db = tmp_path / "landscapes.json.gz", tmp_path / "autotax.db"
    with Store.open(db) as store:
        keep_winner(store)
    good = msgspec.to_builtins(landscapes.write(file, [db], tmp_path))
    refused = 0

    @many(amount)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal refused
        file.write_bytes(gzip.compress(as_json(changed(good, data)), 1))
        try:
            archive = landscapes.read(file)
        except UsageError as error:
            refused += 1
            check_message(error)
        else:
            assert all(result.config.variant for _, result in archive.of_runs())
            json.dumps([archive.t4(key) for key in archive.problems])

    check()
    assert refused > amount / 4


@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_file_of_shapes(tmp_path: Path, amount: int) -> None:
    file = tmp_path / "shapes.toml"
    odd = ['"64"', '"\\u001b[1m"', "[1]", "{a = 1}", "2026-01-02", "9" * 40]
    values = st.sampled_from(["64", "-1", "0", "64.0", "true", "1e14", *odd])
    names = st.sampled_from(["m", "n", "k", "dtype", "shard", "world_size", "page", "op", '"\\u001b[1m"', "a.b", '"[red]"'])
    tables = st.sampled_from(["[[all-gather-gemm]]", "[[flash-decode]]", "[all-gather-gemm]", "[[x]]", '[["\\u001b[1m"]]', ""])

    @many(amount)
    @given(tables, st.dictionaries(names, values, max_size=4), st.booleans())
    def check(table: str, entries: dict[str, str], whole: bool) -> None:
        given = ({"m": "64", "n": "128", "k": "64"} if whole else {}) | entries
        file.write_text("\n".join([table, *(f"{name} = {value}" for name, value in given.items())]))
        try:
            problems = read_shapes(file, 2)
        except UsageError as error:
            check_message(error)
        else:
            assert all(problem_from_dict(problem.to_dict()) == problem for problem in problems)

    check()


# Rows

COLUMNS = {
    "autotax_winner": "problem_key hardware_digest kernel_digest world_size comm conditions triton environment_digest trial_id "
    "config latency_us baseline_us baseline speedup interval_low interval_high tie verified samples created_at",
    "autotax_trial": "run_id number variant config config_digest kernel_digest status latency_us samples slowest_rank compile_s "
    "verified relative_error error conditions created_at",
    "autotax_run": "problem_key hardware_digest environment_digest settings status started_at ended_at notices accounts",
    "autotax_problem": "key op fields",
    "autotax_hardware": "digest backend device target count memory_gib processors shared_memory l2_bytes links",
    "autotax_environment": "digest python torch triton comm kernels",
    "autotax_miss": "problem_key hardware_digest conditions count last_asked",
}
PLACES = [(table, column) for table, columns in COLUMNS.items() for column in columns.split()]
JSON_COLUMNS = {"config", "baseline", "samples", "conditions", "settings", "notices", "accounts", "fields"}


@pytest.fixture
def spoil(tmp_path: Path) -> Iterator[Callable[[str, str, Any], Path]]:
    """Makes a database with one row of each kind, then edits a column, like a user with an SQL editor."""
    good, db = tmp_path / "good.db", tmp_path / "autotax.db"
    with Store.open(good) as store:
        keep_winner(store)
        store.add_misses([MissRecord(replace(PROBLEM, m=64), HARDWARE, ON_CPU, 1, NOW)])

    def edit(table: str, column: str, value: Any) -> Path:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{db}{suffix}").unlink(missing_ok=True)
        shutil.copy(good, db)
        with sqlite3.connect(db) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute(f"UPDATE {table} SET {column} = ?", [value])
        connection.close()
        reload()
        return db

    yield edit
    reload()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("amount", [SAMPLE // 2, pytest.param(VOLUME // 3, marks=pytest.mark.volume)])
def test_a_row(spoil: Callable[[str, str, Any], Path], amount: int) -> None:
    @many(amount)
    @given(st.sampled_from(PLACES), st.data())
    def check(place: tuple[str, str], data: st.DataObject) -> None:
        value = data.draw(st.sampled_from([option for option in WRONG if not isinstance(option, str) or "\ud800" not in option]))
        if isinstance(value, list | dict) or (place[1] in JSON_COLUMNS and data.draw(st.booleans())):
            value = json.dumps(value) if not isinstance(value, bytes) else value
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            value = float(value)
        try:
            db = spoil(*place, value)
        except sqlite3.IntegrityError:  # NULL where none may be
            return
        readers: list[Callable[[Store], object]] = [
            lambda store: store.winners(),
            lambda store: store.trials(),
            lambda store: store.runs(),
            lambda store: store.misses(HARDWARE),
            lambda store: store.entries(*ALL),
            lambda store: page("a database", NOW, store.winners(), store.trials(), []),
        ]
        with Store.open(db, create=False) as store:
            for reader in readers:
                try:
                    reader(store)
                except UsageError as error:
                    check_message(error)
        for stale in (False, True):
            answer = lookup(PROBLEM, db=db, allow_stale=stale)
            assert answer.match in ("exact", "stale", "fallback") and "\n" not in answer.reason
            assert type(answer.values.get("block_m")) is int
        with Store.open(db) as store:
            try:
                keep_winner(store)
                store.add_misses([MissRecord(replace(PROBLEM, m=64), HARDWARE, ON_CPU, 1, NOW)])
            except UsageError as error:
                check_message(error)

    check()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("config", '{"variant": "push", "params": {"block_m": 64.0}}', "expected int | str, got float"),
        ("config", '{"variant": "push", "params": {"block_m": true}}', "got bool"),
        ("config", "{", "malformed"),
        ("config", b"\xff\x00", "got bytes"),
        ("speedup", "fast", "expected float, got str"),
        ("interval_low", 1e300, "expected float < 1"),
        ("tie", "no", "expected bool | int, got str - at $.tie"),
        ("tie", 2, "expected int <= 1"),
        ("conditions", "lazy", "conditions are 'lazy'"),
        ("environment_digest", "f" * 16, "its place is not there"),
    ],
)
@pytest.mark.parametrize("allow_stale", [False, True])
def test_a_winners_row_that_is_malformed_is_a_miss_with_a_reason(
    spoil: Callable[[str, str, Any], Path], column: str, value: object, said: str, allow_stale: bool
) -> None:
    answer = lookup(PROBLEM, db=spoil("autotax_winner", column, value), allow_stale=allow_stale)
    assert answer.match == "fallback" and answer.variant == "bsp"
    assert "its row in the database is malformed" in answer.reason and said in answer.reason


def test_shipped_winners_that_are_malformed_are_a_miss_with_a_reason(tmp_path: Path) -> None:
    shipped.FOLDER.mkdir()
    (shipped.FOLDER / "a.json").write_text("{")
    formats.write(shipped.FOLDER / "b.json", [an_entry(problem=replace(PROBLEM, m=2048))])
    answer = lookup(PROBLEM, db=tmp_path / "none.db")
    assert answer.match == "fallback" and "a.json is no export of autotax" in answer.reason
    assert lookup(replace(PROBLEM, m=2048), db=tmp_path / "none.db").match == "exact"
