"""A short unattended run on CPU ranks: faults in the ranks, a tuner that is killed, and nothing lost or left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotax.db import Store
from tests.db.conftest import ENVIRONMENT, HARDWARE, PROBLEM, a_trial
from tests.unattended import Batch, Supervisor, report

ROOT = Path(__file__).parents[1]
SHAPES = """
[[all-gather-gemm]]
m = 16
n = 16
k = 32
dtype = "fp32"

[[flash-decode]]
batch = 1
q_heads = 2
kv_heads = 1
head_dim = 16
kv_len = 32
dtype = "fp32"
"""


@pytest.mark.volume  # of what tests of the runner, the tuner and the commands show one by one
@pytest.mark.timeout(280)
def test_problems_are_finished_whatever_goes_wrong(tmp_path: Path) -> None:
    shapes, report = tmp_path / "shapes.toml", tmp_path / "report.json"
    shapes.write_text(SHAPES)
    arguments = ["--minutes", "0.3", "--kill-every", "0.15", "--every", "2", "--trials", "5", "--soak", "1", "--backend", "cpu"]
    files = ["--db", str(tmp_path / "tuned.db"), "--shapes", str(shapes), "--json", str(report)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unattended", *arguments, *files], cwd=ROOT, capture_output=True, text=True, timeout=260
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(report.read_text())
    assert all(problem["finished"] and problem["winner"] for problem in summary["problems"]) and len(summary["problems"]) == 2
    assert sum(fault["times"] for fault in summary["faults"].values()) >= 3 and summary["kills"] >= 1
    assert summary["complaints"] == [] and summary["left"]["processes"] == []


@pytest.mark.parametrize("own", [True, False])
def test_a_report_tells_of_its_own_runs(own: bool, tmp_path: Path) -> None:
    """A config that was fine twice and failed once has been blamed, but not by faults of a run before this one."""
    db = f"sqlite:///{tmp_path}/tuned.db"
    with Store.open(db) as store:
        run = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})
        for number, status in enumerate(("ok", "ok", "crash")):
            store.add_trial(run, a_trial(number, status=status, error="killed" if status == "crash" else None))
    supervisor = Supervisor("cpu", db, 1, None, 6, 60.0, tmp_path)
    if not own:
        supervisor.run([], seconds=0)
    summary = report(supervisor, [])
    assert len(summary["complaints"]) == own
    assert summary["trials"] == ({"ok": 2, "crash": 1} if own else {})


@pytest.mark.parametrize("rounds", [0, 1])
def test_when_the_time_is_up_only_what_was_never_tuned_is_begun(rounds: int, tmp_path: Path) -> None:
    """A tuner that is killed then has begun no problem here: in the first round that is made up for, in a later one not."""
    tuned: list[tuple[int, bool]] = []

    class Ended(Supervisor):
        def tune(self, batch: Batch, kill_at: float | None) -> bool:
            """Completes each round at once; the last round is killed."""
            tuned.append((batch.seed, kill_at is not None))
            if batch.seed < rounds or kill_at is None:
                return False
            time.sleep(max(0.0, kill_at - time.monotonic()))
            return True

    db = f"sqlite:///{tmp_path}/tuned.db"
    with Store.open(db):
        pass
    Ended("cpu", db, 1, None, 6, 3600.0, tmp_path).run([PROBLEM], seconds=1.5)
    assert tuned == ([(0, True), (0, False)] if rounds == 0 else [(0, True), (1, True)])
