"""The file of all trials: databases one after the other, or all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotax.core.errors import UsageError
from autotax.db import Store
from results.search import landscapes
from tests.db.conftest import keep_winner


@pytest.fixture
def databases(tmp_path: Path) -> list[Path]:
    """Two databases with a trial each."""
    paths = [tmp_path / "first.db", tmp_path / "second.db"]
    for path in paths:
        with Store.open(path) as store:
            keep_winner(store)
    return paths


def test_later_databases_go_behind_what_is_kept(tmp_path: Path, databases: list[Path]) -> None:
    at_once, in_turn = tmp_path / "at_once.json.gz", tmp_path / "in_turn.json.gz"
    landscapes.write(at_once, databases, tmp_path)
    landscapes.write(in_turn, databases[:1], tmp_path)
    landscapes.write(in_turn, databases[1:], tmp_path, landscapes.read(in_turn))
    archive = landscapes.read(in_turn)
    assert archive == landscapes.read(at_once)
    assert [run.database for run, _ in archive.of_runs()] == ["first.db", "second.db"]


def test_a_database_is_not_kept_twice(tmp_path: Path, databases: list[Path]) -> None:
    file = tmp_path / "landscapes.json.gz"
    landscapes.write(file, databases[:1], tmp_path)
    before = file.read_bytes()
    with pytest.raises(UsageError, match=r"database is first\.db; runs of that name are kept already: rename the file"):
        landscapes.write(file, databases, tmp_path, landscapes.read(file))
    assert file.read_bytes() == before
