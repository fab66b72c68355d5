"""A disk without a free byte: what is kept can be read, what writes ends with exit code 1 and one line, and goes on later.

The disk is one of memory, for which it takes the right to mount.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autotax.db import Store, formats
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from tests.cli.conftest import BSP, PUSH, Result, Run, Tuner, db, keep_winner, ranks, run, tuner  # noqa: F401
from tests.db.conftest import EXAMPLES
from tests.db.test_exchange import an_entry

PROBLEM = AllGatherGemm(64, 96, 64, "fp32", world_size=2)
GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64", "--dtype", "fp32", "--world-size", "2"]
more = pytest.mark.volume


@dataclass
class Disk:
    folder: Path

    def fill(self) -> None:
        """Fills the disk to the last byte, so that no file can be created."""
        with suppress(OSError), (self.folder / "ballast").open("ab", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1024))

    def free(self) -> None:
        (self.folder / "ballast").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """It holds a database with one winner, `autotax.db`, and a file of winners, `winners.json`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount")
    try:
        keep_winner(folder / "autotax.db", PROBLEM, detect("cpu"), PUSH, BSP)
        formats.write(folder / "winners.json", [an_entry(by="before")])
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def output_of(result: Result) -> str:
    """The single error line of a command that a fault of the machine has ended."""
    assert result.code == 1, result
    assert not result.out
    line = result.err.splitlines()[-1]
    assert line.startswith("autotax: ") and ("free space" in line or "works and has space" in line), result
    assert "Traceback" not in result.err
    return line


@pytest.mark.parametrize("command", ["winners", *(pytest.param(name, marks=more) for name in ("lookup", "trials", "doctor"))])
def test_what_is_kept_can_be_read(run: Run, disk: Disk, command: str) -> None:  # noqa: F811
    line = [command, *(GEMM if command == "lookup" else []), "--db", disk.folder / "autotax.db"]
    before = run(*line)
    disk.fill()
    for _ in range(2):
        assert run(*line) == before
        assert sorted(path.name for path in disk.folder.iterdir()) == ["autotax.db", "ballast", "winners.json"]
    assert before.code == 0 and ("push" in before.out or command == "doctor")


@pytest.mark.parametrize("written", [False, pytest.param(True, marks=more)])
def test_what_a_killed_writer_leaves_can_be_read(run: Run, disk: Disk, written: bool) -> None:  # noqa: F811
    """The write-ahead log may be empty or not; its shared-memory index is lost."""
    path = disk.folder / "autotax.db"
    process = multiprocessing.get_context("fork").Process(target=write_and_die, args=[path, written])
    process.start()
    process.join()
    assert (path.with_name("autotax.db-wal").stat().st_size > 0) is written
    path.with_name("autotax.db-shm").unlink()
    disk.fill()
    for _ in range(2):
        assert len(run("winners", "--json", "--db", path).results) == 1 + written


def write_and_die(path: Path, written: bool) -> None:
    store = Store.open(path)
    if written:
        EXAMPLES.keep(store, problem=replace(PROBLEM, m=128))
    os._exit(0)


def test_what_is_kept_can_be_taken_elsewhere(run: Run, disk: Disk, tmp_path: Path) -> None:  # noqa: F811
    disk.fill()
    for command in ("export", "report"):
        assert run(command, "--db", disk.folder / "autotax.db", "-o", tmp_path / command).code == 0
    assert [entry.winner.problem for entry in formats.read(tmp_path / "export")] == [PROBLEM]


@pytest.mark.parametrize(
    ("command", "name"),
    [("export", "winners.json"), *(pytest.param(*case, marks=more) for case in (("export", "new"), ("report", "winners.json")))],
)
def test_a_file_is_written_whole_or_what_was_there_stays(run: Run, disk: Disk, command: str, name: str) -> None:  # noqa: F811
    database, output = disk.folder / "autotax.db", disk.folder / name
    before = output.read_bytes() if output.exists() else None
    disk.fill()
    files = sorted(disk.folder.iterdir())
    assert str(output) in output_of(run(command, "--db", database, "-o", output))
    assert (output.read_bytes() if output.exists() else None) == before
    assert sorted(disk.folder.iterdir()) == files
    disk.free()
    assert run(command, "--db", database, "-o", output).code == 0


def test_an_import_is_whole_or_none_and_succeeds_later(run: Run, disk: Disk, tmp_path: Path) -> None:  # noqa: F811
    database, file = disk.folder / "autotax.db", tmp_path / "many.json"
    formats.write(file, [an_entry(problem=replace(PROBLEM, m=64 * m)) for m in range(2, 60)])
    disk.fill()
    assert str(database) in output_of(run("import", file, "--db", database))
    assert winners(database) == 1
    disk.free()
    assert run("import", file, "--db", database).code == 0
    assert winners(database) == 59


@pytest.mark.parametrize("place", ["autotax.db", pytest.param("new.db", marks=more), pytest.param("folder/new.db", marks=more)])
def test_tuning_ends_and_succeeds_later(run: Run, tuner: Tuner, disk: Disk, place: str) -> None:  # noqa: F811
    command = ["tune", *GEMM, "--trials", "1", "--db", disk.folder / place]
    disk.fill()
    assert str(disk.folder / place) in output_of(run(*command))
    disk.free()
    assert run(*command).code == 0
    with Store.open(disk.folder / place, create=False) as store:
        assert store.counts()["trials"] == (3 if place == "autotax.db" else 2)


def winners(path: Path) -> int:
    with Store.open(path, create=False) as store:
        return store.counts()["winners"]
