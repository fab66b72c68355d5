"""Several writers at once, and writers that are killed."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from autotax.db import Store
from autotax.db.url import sqlite_path
from tests.db.conftest import PROBLEM

ROOT = Path(__file__).parents[2]
TRIALS = 50

# Prints the number of a trial once the store has returned from keeping it.
WRITER = """
import sys
from autotax.db import Store
from tests.db.conftest import ENVIRONMENT, HARDWARE, PROBLEM, a_trial
store = Store.open(sys.argv[1])
run_id = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})
print("run", run_id, flush=True)
for number in range(int(sys.argv[2])):
    store.add_trial(run_id, a_trial(number))
    print(number, flush=True)
store.end_run(run_id, "done")
store.close()
"""


def writer(url: str, trials: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, str(trials)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_four_writers_at_once_lose_nothing(url: str) -> None:
    writers = [writer(url, TRIALS) for _ in range(4)]
    for process in writers:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with Store.open(url, create=False) as store:
        runs = store.runs(PROBLEM)
        assert [run.status for run in runs] == ["done"] * 4
        for run in runs:
            assert [trial.number for trial in store.trials(run_id=run.id)] == list(range(TRIALS))


@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_killed_writer_loses_at_most_the_trial_in_flight(url: str, after: int) -> None:
    process = writer(url, 10**6)
    assert process.stdout is not None
    run_id = int(process.stdout.readline().split()[1])
    for _ in range(after):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    told = after + len(process.stdout.read().split())
    process.communicate()

    if path := sqlite_path(url):
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
    with Store.open(url) as store:
        kept = [trial.number for trial in store.trials(run_id=run_id)]
        assert kept in (list(range(told)), list(range(told + 1)))
        assert store.runs()[0].status == "running"
        store.end_run(run_id, "interrupted")


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
