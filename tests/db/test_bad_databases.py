"""Paths and URLs that are no database: each gives an error of one line, and no file is created or changed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from autotax.core.errors import UsageError
from autotax.db import Store, default_url, resolve_url
from autotax.db.url import named, public, shown, without_secrets
from tests.db.conftest import keep_winner, snapshot

NOBODY = 65534

both_ways = pytest.mark.parametrize("create", [True, False])


def complaint(url: str | Path, create: bool = True) -> str:
    with pytest.raises(UsageError) as caught:
        Store.open(url, create=create)
    message = str(caught.value)
    assert "\n" not in message
    assert "--db" in message
    return message


def sqlite_file(path: Path, *statements: str) -> Path:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


def garbage(folder: Path) -> Path:
    path = folder / "notes.db"
    path.write_bytes(b"not a database at all " * 500)
    return path


def short_garbage(folder: Path) -> Path:
    path = folder / "notes.db"
    path.write_bytes(b"SQL")
    return path


def own_file_cut(bytes_kept: float) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "autotax.db"
        with Store.open(path) as store:
            keep_winner(store)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * bytes_kept)])
        return path

    return make


def other_program(folder: Path) -> Path:
    return sqlite_file(folder / "places.sqlite", "CREATE TABLE moz_places (id INTEGER)")


def other_program_in_wal(folder: Path) -> Path:
    return sqlite_file(folder / "places.sqlite", "PRAGMA journal_mode = WAL", "CREATE TABLE moz_places (id INTEGER)")


def of_version(version: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "autotax.db"
        with Store.open(path) as store:
            keep_winner(store)
        return sqlite_file(path, f"UPDATE autotax_meta SET value = '{version}' WHERE name = 'schema_version'")

    return make


OTHER_VERSION = "made by another version of autotax; this one knows version 4: `autotax export` its winners with that version"


def no_version(folder: Path) -> Path:
    path = folder / "autotax.db"
    Store.open(path).close()
    return sqlite_file(path, "UPDATE autotax_meta SET value = 'two' WHERE name = 'schema_version'")


def with_code(*statements: str) -> Callable[[Path], Path]:
    """A database of ours to which somebody has added code."""
    return lambda folder: sqlite_file(of_version(4)(folder), *statements)


A_VIEW = "ALTER TABLE autotax_winner RENAME TO w", "CREATE VIEW autotax_winner AS SELECT * FROM w"
A_TRIGGER = "CREATE TRIGGER t AFTER INSERT ON autotax_trial BEGIN DELETE FROM autotax_trial; END"


def a_folder(folder: Path) -> Path:
    (folder / "autotax.db").mkdir()
    return folder / "autotax.db"


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("text")
    return folder / "file" / "deeper" / "autotax.db"


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@both_ways
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (garbage, "is not a SQLite database"),
        (short_garbage, "is not a SQLite database"),
        (own_file_cut(0.5), "cut short"),
        (own_file_cut(0.9999), "cut short"),
        (own_file_cut(0.0005), "cut short"),
        (other_program, "belongs to another program (its tables: moz_places)"),
        (other_program_in_wal, "belongs to another program"),
        (of_version(99), f"has schema version 99, {OTHER_VERSION}"),
        (of_version(3), f"has schema version 3, {OTHER_VERSION}"),
        (no_version, "does not tell its schema version"),
        (with_code(*A_VIEW), "has a view named 'autotax_winner', which autotax does not make"),
        (with_code(A_TRIGGER), "has a trigger named 't', which autotax does not make"),
        (a_folder, "is not a file"),
        (below_a_file, "Not a directory"),
        (a_pipe, "is not a file"),
    ],
)
def test_a_bad_file_is_told_in_one_line_and_left_alone(
    tmp_path: Path, make: Callable[[Path], Path], says: str, create: bool
) -> None:
    path = make(tmp_path)
    before = snapshot(tmp_path)
    message = complaint(path, create)
    assert says in message
    assert str(path) in message
    assert snapshot(tmp_path) == before


@both_ways
def test_a_damaged_page_is_told_in_one_line(tmp_path: Path, create: bool) -> None:
    path = tmp_path / "autotax.db"
    with Store.open(path) as store:
        keep_winner(store)
    damaged = bytearray(path.read_bytes())
    damaged[4096:] = b"\xff" * (len(damaged) - 4096)
    path.write_bytes(damaged)
    with pytest.raises(UsageError, match="malformed") as caught, Store.open(path, create=create) as store:
        store.winners()
    assert "\n" not in str(caught.value)


@both_ways
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("oracel://host/name", "unknown kind 'oracel'"),
        ("postgres://user:secret@host/name", "unknown kind 'postgres'"),
        ("mysql+mysqlconnector://user:secret@host/name", "which is not installed"),
        ("http://[::1", "cannot be read"),
        ("postgresql://host:port/name", "cannot be read"),
        ("sqlite://autotax.db", "no host"),
        ("sqlite:/tmp/autotax.db", "lacks a slash"),
        ("sqlite://", "names no file"),
        ("sqlite:////", "names no file"),
        ("/", "names no file"),
        ("bad\udcff.db", "is not UTF-8"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/bad\udcff", "cannot be read"),
        (":memory:", "names no file"),
        ("", "names no file"),
        ("~nobody-of-that-name/autotax.db", "no user"),
        ("sqlite:////tmp/autotax.db?mode=ro", "driver or options"),
    ],
)
def test_a_bad_url_is_told_in_one_line(
    url: str, says: str, create: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = complaint(url, create)
    assert says in message
    assert "secret" not in message
    assert list(tmp_path.iterdir()) == []


SECRETS = [
    "postgresql+psycopg://user:se%cret%40@127.0.0.1:1/name",
    "postgresql+psycopg://user@127.0.0.1:1/name?password=se%25cret%40",
    "postgresql+psycopg://127.0.0.1:1/name?user=u&password=se%25cret%40&connect_timeout=1",
    "postgresql+psycopg://127.0.0.1:1/name?sslpassword=se%25cret%40",
]


@both_ways
@pytest.mark.parametrize("url", SECRETS)
def test_a_password_is_never_told(url: str, create: bool) -> None:
    pytest.importorskip("psycopg")
    url = url.replace("se%cret", "se%25cret")
    texts = [complaint(url, create), shown(resolve_url(url)), named(resolve_url(url)), public(make_url(url))]
    texts.append(without_secrets(url, "no password se%cret@ or se%25cret%40 for user"))
    assert not [text for text in texts if "cret" in text]
    assert all("127.0.0.1" in text for text in texts[1:4])


@pytest.mark.parametrize("url", ["postgresql:/user:secret@host/name", "sqlite://user:secret@host/x.db?password=secret"])
def test_nor_is_one_in_a_url_that_cannot_be_read(url: str) -> None:
    assert "secret" not in complaint(url)


def test_a_folder_that_takes_no_files_is_told_in_one_line() -> None:
    assert "cannot be" in complaint("/proc/autotax.db")
    assert "cannot be created" in complaint("/proc/autotax/autotax.db")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A read-only file system that holds a database with one winner, `autotax.db`; permissions do not stop root."""
    with Store.open(tmp_path / "disk" / "autotax.db") as store:
        keep_winner(store)
    disk = tmp_path / "disk"
    bind = subprocess.run(["mount", "--bind", disk, disk], capture_output=True, check=False)
    if bind.returncode:
        pytest.skip("needs the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True, capture_output=True)
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_read_only_disk_can_be_read_and_is_told_in_one_line(read_only: Path) -> None:
    assert "cannot be written" in complaint(read_only / "autotax.db")
    assert "cannot be" in complaint(read_only / "new.db")
    assert "cannot be" in complaint(read_only / "folder" / "new.db")
    with Store.open(read_only / "autotax.db", create=False) as store:
        assert len(store.winners()) == 1
    with Store.open(read_only / "new.db", create=False) as store:
        assert not store.exists


@pytest.fixture
def ordinary_folder() -> Iterator[Path]:
    """A folder of a user whom permissions stop: root becomes nobody for the time of the test."""
    with tempfile.TemporaryDirectory() as folder:
        if os.getuid() != 0:
            yield Path(folder)
            return
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


def test_what_may_not_be_written_is_told_in_one_line(ordinary_folder: Path) -> None:
    path = ordinary_folder / "autotax.db"
    with Store.open(path) as store:
        keep_winner(store)
    path.chmod(0o400)
    assert "cannot be written" in complaint(path)
    with Store.open(path, create=False) as store:
        assert len(store.winners()) == 1
    path.chmod(0o600)
    ordinary_folder.chmod(0o500)
    assert "cannot be written" in complaint(path)
    assert "cannot be" in complaint(ordinary_folder / "new.db")
    assert "cannot be created" in complaint(ordinary_folder / "folder" / "new.db")
    assert [entry.name for entry in ordinary_folder.iterdir()] == ["autotax.db"]
    with Store.open(path, create=False) as store:
        assert len(store.winners()) == 1
    ordinary_folder.chmod(0o700)
    path.chmod(0o000)
    assert "cannot be read" in complaint(path)
    assert "cannot be read" in complaint(path, create=False)


def test_a_server_that_does_not_answer_is_told_in_one_line() -> None:
    pytest.importorskip("psycopg")
    url = "postgresql+psycopg://user:secret@127.0.0.1:1/name"
    assert "secret" not in complaint(url)
    assert "secret" not in complaint(url, create=False)


def test_reading_what_is_not_there_creates_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "autotax.db", tmp_path / "deep" / "autotax.db"):
        with Store.open(path, create=False) as store:
            assert not store.exists
            assert store.trials() == store.winners() == store.runs() == []
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    path = tmp_path / "autotax.db"
    path.touch()
    with Store.open(path, create=False) as store:
        assert not store.exists
    assert path.stat().st_size == 0
    with Store.open(path) as store:
        keep_winner(store)


def test_reading_leaves_no_files_beside(tmp_path: Path) -> None:
    path = tmp_path / "autotax.db"
    with Store.open(path) as store:
        keep_winner(store)
    before = snapshot(tmp_path)
    assert list(before) == [str(path)]
    with Store.open(path, create=False) as store:
        store.winners()
    assert snapshot(tmp_path) == before


def test_who_may_only_read_finds_through_a_link_what_is_still_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "team.db").symlink_to("real/autotax.db")
    with Store.open(tmp_path / "team.db") as writer:
        keep_winner(writer)
        monkeypatch.setattr("autotax.db.connection.may_write", lambda _: False)
        with Store.open(tmp_path / "team.db", create=False) as reader:
            assert len(reader.winners()) == 1


def test_wal_stays_on(tmp_path: Path) -> None:
    path = tmp_path / "autotax.db"
    Store.open(path).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_default_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTAX_DB", raising=False)
    assert default_url().startswith("sqlite:////")
    assert default_url().endswith("/autotax/autotax.db")
    monkeypatch.setenv("AUTOTAX_DB", str(tmp_path / "mine.db"))
    assert default_url() == resolve_url(None) == f"sqlite:///{tmp_path}/mine.db"
    monkeypatch.setenv("AUTOTAX_DB", f"sqlite:///{tmp_path}/url.db")
    assert default_url() == f"sqlite:///{tmp_path}/url.db"
    monkeypatch.chdir(tmp_path)
    assert resolve_url("here.db") == resolve_url("sqlite:///here.db") == f"sqlite:///{tmp_path}/here.db"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_url("~/home.db") == f"sqlite:///{tmp_path}/home.db"


@pytest.mark.parametrize("name", ["what?.db", "50%25.db", "a#b.db", "semi;colon.db", "ümläut ☃.db"])
def test_odd_names_reach_the_file_of_that_name(tmp_path: Path, name: str) -> None:
    with Store.open(tmp_path / name) as store:
        keep_winner(store)
    assert [path.name for path in tmp_path.iterdir()] == [name]
