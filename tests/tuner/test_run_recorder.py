"""Recovery of a run's end status that the database did not store."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotax.tuner import run_recorder


@pytest.mark.parametrize("name", ["sqlite:///FOLDER/tuned.db", "postgresql+psycopg://me:secret@host/tuned"])
def test_the_next_run_on_the_same_database_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    url, other = (name.replace("FOLDER", str(tmp_path)).replace("tuned", stem) for stem in ("tuned", "tuned.run-1"))
    assert run_recorder.left(url) == []
    run_recorder.leave(other, 3, "failed")
    run_recorder.leave(url, 12, "interrupted")
    ((path, run_id, status),) = run_recorder.left(url)
    assert (run_id, status) == (12, "interrupted") and path.is_file() and "secret" not in path.name


def test_a_folder_that_takes_no_file_is_no_further_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_recorder.leave(f"sqlite:///{tmp_path}/file/tuned.db", 1, "failed")
