"""A database that fails during a run: one error line, no partial writes, and the run continues when the cause is gone."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError

from autotax.core.errors import MachineError
from autotax.db import DatabaseBusy, Store, failing, resolve_url
from autotax.db import connection as sqlite
from tests.db.conftest import ENVIRONMENT, HARDWARE, PROBLEM, a_trial

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "autotax.db"


@pytest.fixture
def hold(path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that keeps the database locked until its input ends."""
    holders: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(path)]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout and holders[-1].stdout.readline() == "held\n"
        return holders[-1]

    yield start
    for holder in holders:
        holder.communicate()


def begun(store: Store) -> int:
    return store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})


def add_until_it_fails(store: Store, run_id: int, first: int = 0) -> tuple[int, MachineError]:
    """Adds trials until one fails. Returns the number of stored trials and the message."""
    big = [[float(number) for number in range(2000)]]
    for number in range(first, first + 10_000):
        try:
            store.add_trial(run_id, a_trial(number, samples=big))
        except MachineError as error:
            assert "\n" not in str(error)
            assert "run the same command again" in str(error)
            return number, error
    raise AssertionError("it never failed")


def holds(path: Path, trials: int) -> None:
    """Checks that the file is intact and holds this many trials, for a reader and for a writer."""
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    with Store.open(path, create=False) as store:
        assert [trial.number for trial in store.trials()] == list(range(trials))


def test_a_full_database_keeps_what_it_has_and_goes_on_later(path: Path) -> None:
    with Store.open(path) as store:
        run_id = begun(store)
        limit_pages(store, 100)
        kept, error = add_until_it_fails(store, run_id)
        assert "is full" in str(error)
        assert "free space" in str(error)
        assert not isinstance(error, DatabaseBusy)
        with pytest.raises(MachineError):
            store.add_notice(run_id, "x" * 100_000)
        limit_pages(store, 10**6)
        store.add_trial(run_id, a_trial(kept))
        assert store.runs()[0].notices == ()
    assert kept > 0
    holds(path, kept + 1)


def limit_pages(store: Store, pages: int) -> None:
    with store.engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")


def test_a_write_that_the_system_refuses(path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store.open(path) as store:
        run_id = begun(store)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, unlimited[1]))
            kept, error = add_until_it_fails(store, run_id)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert "see that its disk works and has space" in str(error)
        store.add_trial(run_id, a_trial(kept))
    holds(path, kept + 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(10**6))
    path = small_disk / "autotax.db"
    with Store.open(path) as store:
        run_id = begun(store)
        kept, error = add_until_it_fails(store, run_id)
        assert "is full" in str(error)
        assert "free space" in str(error)
        ballast.unlink()
        store.add_trial(run_id, a_trial(kept))
        store.end_run(run_id, "done")
    holds(path, kept + 1)


def test_a_lock_that_stays_is_told_apart_and_leaves_nothing_behind(
    path: Path, hold: Callable[[], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.02)
    with Store.open(path) as store:
        run_id = begun(store)
        holder = hold()
        for _ in range(30):  # more than a pool has connections
            with pytest.raises(DatabaseBusy, match=r"kept locked by another process.*run the same command again"):
                store.add_trial(run_id, a_trial())
        assert store.trials() == []  # readers do not wait
        holder.communicate()
        store.add_trial(run_id, a_trial())
    holds(path, 1)


def test_a_lock_that_is_released_in_time_is_waited_for(path: Path, hold: Callable[[], subprocess.Popen[str]]) -> None:
    with Store.open(path) as store:
        run_id = begun(store)
        holder = hold()
        started = time.monotonic()
        release = threading.Timer(0.5, holder.communicate)
        release.start()
        store.add_trial(run_id, a_trial())
        assert time.monotonic() - started > 0.4
        release.join()
    holds(path, 1)


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_vanishes_is_noticed_and_nothing_is_lost(path: Path, suffix: str, replaced: bool) -> None:
    file, aside = Path(f"{path}{suffix}"), path.with_name("aside")
    with Store.open(path) as store:
        run_id = begun(store)
        store.add_trial(run_id, a_trial())
        file.rename(aside)
        if replaced:
            file.write_bytes(aside.read_bytes())
        for _ in range(20):
            with pytest.raises(MachineError, match="removed or replaced while in use: put it back") as caught:
                store.add_trial(run_id, a_trial(1))
            assert "\n" not in str(caught.value)
        aside.rename(file)
        store.add_trial(run_id, a_trial(1))
    holds(path, 2)


def test_a_log_that_was_deleted_costs_nothing_that_was_told(path: Path) -> None:
    with Store.open(path) as store:
        kept = begun(store)
        store.add_trial(kept, a_trial())
        Path(f"{path}-wal").unlink()
        with pytest.raises(MachineError, match="removed or replaced"):
            store.add_trial(kept, a_trial(1))
    holds(path, 1)
    with Store.open(path) as store:
        store.add_trial(kept, a_trial(1))
    holds(path, 2)


def test_a_connection_that_is_given_up_takes_its_log_along(path: Path) -> None:
    """Ctrl-C during a statement abandons a connection like this. The last connection removes the log; the next recreates it."""
    with Store.open(path) as store:
        run_id = begun(store)
        log = Path(f"{path}-wal").stat().st_ino
        with store.engine.connect() as connection:
            connection.invalidate()
        for other in range(100):  # lest the new log takes the number of the old one
            Path(f"{path}-other{other}").touch()
        store.end_run(run_id, "interrupted")
        assert Path(f"{path}-wal").stat().st_ino != log
        assert store.runs()[0].status == "interrupted"


def study(path: Path, seconds: float) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings = {"connect_args": {"timeout": seconds}}
    return optuna.create_study(storage=optuna.storages.RDBStorage(resolve_url(path), engine_kwargs=settings))


def raw_begin(url: str) -> None:
    with create_engine(url, connect_args={"timeout": 0.05}).connect() as connection:
        connection.execute(text("BEGIN IMMEDIATE"))


def test_the_studys_part_of_the_database_fails_in_the_same_words(
    path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    url = resolve_url(path)
    Store.open(path).close()
    asked = study(path, 0.05)
    with failing(url):
        trial = asked.ask()
    holder = hold()
    with pytest.raises(DatabaseBusy, match="kept locked by another process"), failing(url):
        trial.set_user_attr("status", "ok")
    with pytest.raises(DatabaseBusy, match="kept locked by another process"), failing(url):
        raw_begin(url)
    holder.communicate()

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, unlimited[1]))
    try:
        with pytest.raises(MachineError, match="disk works and has space") as caught, failing(url):
            trial.set_user_attr("status", "x" * 1000)
        assert not isinstance(caught.value, DatabaseBusy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    with failing(url):
        asked.tell(trial, 1.0)
    assert [record.value for record in asked.get_trials()] == [1.0]


@pytest.mark.parametrize("url", ["server"], indirect=True)
def test_a_server_that_ends_a_connection(url: str) -> None:
    with Store.open(url) as store:
        run_id = begun(store)
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"))
        engine.dispose()
        with pytest.raises(MachineError, match="run the same command again") as caught:
            store.add_trial(run_id, a_trial())
        assert "\n" not in str(caught.value)
        store.add_trial(run_id, a_trial())
        assert len(store.trials()) == 1


@pytest.mark.parametrize(
    "bug", [KeyError("x"), RuntimeError("database is locked"), optuna.exceptions.StorageInternalError("of another kind")]
)
def test_what_is_not_the_databases_passes_through(path: Path, bug: Exception) -> None:
    with pytest.raises(type(bug)) as caught, failing(resolve_url(path)):
        raise bug
    assert caught.value is bug
    with Store.open(path) as store, pytest.raises(IntegrityError), failing(store.url):
        store.add_trial(12345, a_trial())
