"""Files that commands write: whole or not at all, and in place of nothing but a regular file."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from autotax.core import files
from autotax.core.children import import_path
from autotax.core.errors import MachineError, UsageError
from autotax.core.files import a_home, read_once, refuse_unwritable, write_whole


def refused(path: Path, kind: type[Exception] = UsageError) -> str:
    with pytest.raises(kind, match="give another path") as caught:
        write_whole(path, "new")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["", "there/", "nowhere/file.json"])
def test_a_path_is_refused_before_the_work_begins(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match=r"cannot be written .*: give another path"):
        refuse_unwritable(tmp_path / name)
    refuse_unwritable(tmp_path / "new.json")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_new_file_has_the_usual_mode_and_a_replaced_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    mask = os.umask(0o027)
    try:
        write_whole(path, "old")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    write_whole(path, b"new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o604
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    link, dangling, pipe = tmp_path / "link", tmp_path / "dangling", tmp_path / "pipe"
    link.symlink_to("kept")
    dangling.symlink_to("nowhere")
    os.mkfifo(pipe)
    before = sorted(tmp_path.iterdir())
    assert "it is a link" in refused(link) and "it is a link" in refused(dangling)
    assert "it is no regular file" in refused(pipe)
    assert "it is a folder" in refused(tmp_path) and "it is a folder" in refused(Path("/"))
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "kept").read_text() == "kept" and link.is_symlink()


def test_a_device_is_never_replaced() -> None:
    assert "it is no regular file" in refused(Path("/dev/null"))
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_nobody_can_lay_out_a_link_for_the_unfinished_file(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("kept")
    for guess in ("report.html.part", ".report.html.part"):
        (tmp_path / guess).symlink_to(victim)
    write_whole(path, "new")
    assert victim.read_text() == "kept" and path.read_text() == "new"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert "No space left on device): free space on its disk" in refused(path, MachineError)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_user_without_a_home_gets_one_that_nobody_else_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("HOME", raising=False)
    with a_home():
        home = Path(os.environ["HOME"])
        assert stat.S_IMODE(home.stat().st_mode) == 0o700 and not list(home.iterdir())
    assert "HOME" not in os.environ and not home.exists()


def test_a_pipe_that_nobody_writes_ends_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SILENT_S", 0.1)
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(TimeoutError, match="nobody writes to it"):
        read_once(pipe, 100)
    reader = threading.Thread(target=lambda: pipe.write_bytes(b"text"))
    monkeypatch.setattr(files, "SILENT_S", 10)
    reader.start()
    assert read_once(pipe, 100) == read_once(pipe, 100) == b"text"
    reader.join()


def test_a_name_is_as_long_as_the_disk_allows(tmp_path: Path) -> None:
    path = tmp_path / ("\u20ac" * 82 + ".json")
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_children_import_from_no_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["__editable__.finder.__path_hook__", "", "/a:b", "/usr/lib/python", "some"])
    assert import_path() == f"{tmp_path}:/usr/lib/python"
