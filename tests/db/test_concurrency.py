"""Several writers at once, and writers that are killed."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotax.db import Store
from autotax.db.url import sqlite_path
from tests.db.conftest import ENVIRONMENT, HARDWARE, PROBLEM, a_trial

pytestmark = pytest.mark.usefixtures("without_syncing")
WRITERS = 8
SOME_TRIALS = pytest.mark.parametrize("trials", [60, pytest.param(500, marks=pytest.mark.volume)])
SOME_KILLS = pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.volume)])


@SOME_TRIALS
@pytest.mark.parametrize("url", ["sqlite", "server"], indirect=True)
def test_eight_writers_at_once_lose_nothing(url: str, trials: int, at_once: Callable[..., list[int]]) -> None:
    def write(_: int) -> None:
        with Store.open(url) as store:
            run_id = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})
            for number in range(trials):
                store.add_trial(run_id, a_trial(number))
            store.end_run(run_id, "done")

    assert at_once(WRITERS, write) == [0] * WRITERS
    with Store.open(url, create=False) as store:
        runs = store.runs(PROBLEM)
        assert [run.status for run in runs] == ["done"] * WRITERS
        for run in runs:
            assert [trial.number for trial in store.trials(run_id=run.id)] == list(range(trials))


@SOME_KILLS
@pytest.mark.parametrize("url", ["sqlite", "server"], indirect=True)
def test_writers_that_are_killed_lose_at_most_the_trial_in_flight(url: str, kills: int) -> None:
    chance = random.Random(1)
    for run_id in range(1, kills + 1):
        with Store.open(url) as store:
            assert store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {}) == run_id
        count = written_until_killed(url, run_id, seconds=chance.uniform(0.0, 0.05))
        if path := sqlite_path(url):
            with sqlite3.connect(path) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.close()
        with Store.open(url) as store:
            kept = [trial.number for trial in store.trials(run_id=run_id)]
            assert kept in (list(range(count)), list(range(count + 1)))
            assert store.runs()[-1].status == "running"
            store.end_run(run_id, "interrupted")


def written_until_killed(url: str, run_id: int, seconds: float) -> int:
    """Kills a writer `seconds` after its third trial. Returns the number of trials that its store reported as stored."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)

    def write() -> None:
        with Store.open(url) as store:
            for number in range(10**6):
                store.add_trial(run_id, a_trial(number))
                writer.send_bytes(b"kept")

    process = fork.Process(target=write)
    process.start()
    writer.close()
    count = 0
    try:
        for _ in range(3):
            reader.recv_bytes()
            count += 1
        time.sleep(seconds)
        process.kill()
        while True:
            reader.recv_bytes()
            count += 1
    except EOFError:
        process.join()
        return count


def test_a_database_whose_maker_was_killed_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "autotax.db"
    spill = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
for number in range(100):
    connection.execute(f"CREATE TABLE autotax_{number} (x)")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", spill, str(path)], check=True)
    assert path.with_name("autotax.db-journal").exists()
    with Store.open(path) as store:
        assert store.counts() == {"runs": 0, "trials": 0, "winners": 0}
