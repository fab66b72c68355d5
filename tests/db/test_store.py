"""The conformance suite of stores, on every database under test, and on databases that it must not touch."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from autotax.core.errors import UsageError
from autotax.db import Store, resolve_url
from tests.conformance.stores import CHECKS, check_store, run_check
from tests.db.conftest import keep_winner


@pytest.mark.usefixtures("without_syncing")
@pytest.mark.parametrize("name", CHECKS)
def test_conformance(url: str, name: str) -> None:
    run_check(name, url)


SOME = ("a_run_ends", "what_is_not_verified_never_wins", "it_refuses_what_makes_no_sense")


def test_what_fails_is_told_in_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If SQLite does not enforce constraints, the suite lists the failed checks, a line each."""

    def lax(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("PRAGMA ignore_check_constraints = ON")

    monkeypatch.setattr("tests.conformance.stores.CHECKS", {name: CHECKS[name] for name in SOME})
    event.listen(Engine, "connect", lax)
    try:
        with pytest.raises(AssertionError) as caught:
            check_store(tmp_path / "lax.db")
    finally:
        event.remove(Engine, "connect", lax)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == list(SOME[1:])
    assert all("IntegrityError is due" in line and "stores.py:" in line for line in lines)


def test_a_database_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "autotax.db"
    with Store.open(path) as store:
        winner = keep_winner(store)
    with pytest.raises(UsageError, match=r"is not empty \(it holds autotax_.*\), and the suite would empty it: give another"):
        check_store(path)
    with Store.open(resolve_url(path), create=False) as store:
        assert store.winners() == [winner]
