"""Tasks of submitit's local executor, with real CPU ranks, one of which is killed at work; and what Slurm is asked for."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

submitit = pytest.importorskip("submitit", reason="submitit is not installed: pip install 'autotax[slurm]'")

from autotax.core.errors import UsageError  # noqa: E402
from autotax.fleet.driver import Driver, new_order, open_engine  # noqa: E402
from autotax.fleet.messages import EngineOptions, Event, FleetJob  # noqa: E402
from autotax.hardware import Hardware, detect  # noqa: E402
from autotax.tuner import Settings  # noqa: E402
from tests.fleet.shared import MARK, PROBLEMS, TRIALS, assert_all_tuned_once, nothing_left  # noqa: E402
from tests.fleet.test_driver import Ear  # noqa: E402


def jobs(hardware: Hardware) -> list[FleetJob]:
    return [FleetJob(problem, Settings(trials=TRIALS, soak=0, sampler="random").on(hardware)) for problem in PROBLEMS]


def test_of_two_tasks_one_is_killed_at_work(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = open_engine(EngineOptions("slurm", "local", 2, "cpu", logs=tmp_path / "logs"))
    killed: list[str] = []

    def kill(event: Event) -> None:
        if event["event"] == "problem begun" and not killed and event["host"].endswith("#0"):
            killed.append(event["problem"])
            controller = psutil.Process(engine._slots[0].job._process.pid)  # type: ignore[attr-defined]
            (task,) = [child for child in controller.children() if "_submit" in " ".join(child.cmdline())]
            task.kill()

    ear = Ear(kill)
    with nothing_left(str(tmp_path)):
        order = new_order(url, backend="cpu", lease_s=10.0)
        outcome = Driver(order, engine, jobs, ear).run()
    assert killed and outcome.done, outcome
    assert_all_tuned_once(url, [detect("cpu")])
    assert "worker lost" in ear.names()
    again = [event for event in ear.heard if event["event"] == "problem tuned" and event.get("after_lost_hosts")]
    assert [event["problem"] for event in again] == killed


def test_what_slurm_is_asked_for(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job array of one node and one task each; what the user gives comes last."""
    from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

    monkeypatch.setattr(SlurmExecutor, "affinity", classmethod(lambda _: 2))
    seen: list[str] = []

    def submit(self: SlurmExecutor, delayed: list[object]) -> list[object]:
        seen.append(_make_sbatch_string(command="python x", folder=tmp_path, map_count=len(delayed), **self.parameters))
        raise submitit.core.utils.FailedJobError("sbatch: error: invalid partition specified: h2000")

    monkeypatch.setattr(SlurmExecutor, "_internal_process_submissions", submit)
    parameters = {"partition": "h200", "time": "4:00:00", "gres": "gpu:8", "requeue": True}
    engine = open_engine(EngineOptions("slurm", hosts=300, parameters=parameters, logs=tmp_path))
    with pytest.raises(UsageError, match=r"^Slurm refuses the job \(sbatch: error: invalid partition .*\): give other --slurm$"):
        engine.start(new_order(url))
    lines = seen[0].splitlines()
    for wanted in ("array=0-299%300", "nodes=1", "ntasks-per-node=1", "exclusive", "time=4:00:00", "partition=h200",
                   "gres=gpu:8", "requeue", "job-name=autotax-fleet"):  # fmt: skip
        assert f"#SBATCH --{wanted}" in lines, lines


def test_where_there_is_no_slurm(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no number of hosts given, which Slurm needs: give --hosts$"):
        open_engine(EngineOptions("slurm"))
    with pytest.raises(UsageError, match=r"^--on slurm:here is unknown"):
        open_engine(EngineOptions("slurm", "here", 2))
    with pytest.raises(UsageError, match=r"^no Slurm answers here \(.*\): run the command on a node that has `sbatch`$"):
        open_engine(EngineOptions("slurm", hosts=2, logs=tmp_path)).start(new_order(url))


def test_a_task_that_is_preempted_can_be_submitted_again() -> None:
    from submitit.helpers import DelayedSubmission

    from autotax.fleet.slurm_engine import Task

    order = new_order("postgresql://x/y")
    again = Task().checkpoint(order)
    assert isinstance(again, DelayedSubmission) and again.args == (order,) and isinstance(again.function, Task)
