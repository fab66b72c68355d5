"""Recovery of a run's end status that the database did not store."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotax.core.decoding import Malformed
from autotax.tuner import run_recorder
from tests.adversarial.stranger import NOBODY


@pytest.mark.parametrize("name", ["sqlite:///FOLDER/tuned.db", "postgresql+psycopg://me:secret@host/tuned"])
def test_the_next_run_on_the_same_database_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    url, other = (name.replace("FOLDER", str(tmp_path)).replace("tuned", stem) for stem in ("tuned", "tuned.run-1"))
    assert run_recorder.markers(url) == []
    run_recorder.write_marker(other, 3, "failed")
    run_recorder.write_marker(url, 12, "interrupted")
    ((path, run_id, status),) = run_recorder.markers(url)
    assert (run_id, status) == (12, "interrupted") and path.is_file() and "secret" not in path.name


def test_a_folder_that_takes_no_file_is_no_further_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_recorder.write_marker(f"sqlite:///{tmp_path}/file/tuned.db", 1, "failed")


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user needs root")
def test_a_strangers_marker_ends_no_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tuned.db"
    run_recorder.write_marker(url, 2, "done")
    ((path, _, _),) = run_recorder.markers(url)
    os.chown(path, NOBODY, NOBODY)
    assert run_recorder.markers(url) == []


@pytest.mark.parametrize(
    "notes",
    [{"in flight in run x": {"by": ["host", "boot", 1], "configs": []}}, {"in flight in run 2": {"by": [1, 2], "configs": []}}],
)
def test_an_edited_note_of_a_run_is_malformed(notes: dict[str, Any]) -> None:
    study: Any = SimpleNamespace(user_attrs=notes)
    with pytest.raises(Malformed):
        run_recorder.Flight(study, 3, {2: "running"}, lambda function, *arguments: function(*arguments))
