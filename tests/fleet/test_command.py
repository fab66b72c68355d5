"""`autotax fleet tune`: what it refuses, in one line and before a host is touched; and what it does without Ray or submitit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotax.cli.fleet import FleetOptions, jobs_on
from autotax.cli.options import DeployOptions, MachineOptions, ProblemOptions, SearchOptions
from autotax.db import Store
from autotax.fleet import driver
from autotax.fleet.messages import EngineOptions
from tests.cli.conftest import GPUS, Run, db, run
from tests.fleet.conftest import StandInBench
from tests.fleet.shared import SHAPES
from tests.fleet.test_driver import Threads
from tests.tuner.shared import H200

__all__ = ["db", "run"]
SERVER = ["--db", "postgresql+psycopg://postgres@/postgres?host=/tmp/nowhere"]


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    (path := tmp_path / "shapes.toml").write_text(SHAPES)
    return path


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--on", "ray"], "a fleet tunes either the problems of a file or those missed: give --shapes FILE or --misses"),
        (["--on", "ray", "--misses", "--shapes", "SHAPES"], "either the problems of a file or those missed"),
        (["--on", "ray", "--misses", "--world-size", "4"], "--world-size given with --misses"),
        (["--shapes", "SHAPES"], "no engine given; allowed are ray, ray:ADDRESS, slurm"),
        (["--on", "kube", "--shapes", "SHAPES"], "engine is 'kube'; allowed are ray, slurm"),
        (["--on", "ray", "--shapes", "SHAPES", "--hosts", "0"], "hosts is 0; it must be at least 1"),
        (["--on", "ray", "--shapes", "SHAPES", "--slurm", "partition=x"], "--slurm given, which is for --on slurm"),
        (["--on", "ray", "--shapes", "SHAPES", "--lease", "1s"], "lease is 1s; it must be at least 5s"),
        (["--on", "ray", "--shapes", "SHAPES", "--lease", "soon"], "'soon'; allowed are times such as 90"),
        (["--on", "ray", "--shapes", "/nowhere.toml"], "file /nowhere.toml cannot be read"),
        (["--on", "ray", "--shapes", "SHAPES", "--trials", "0"], "trials is 0; it must be at least 1"),
        (["--on", "ray", "--shapes", "SHAPES", "--db", "file.db"], "file.db; a fleet needs a PostgreSQL server"),
    ],
)
def test_bad_input_is_one_line(run: Run, shapes: Path, asked: list[str], words: str) -> None:
    given = [str(shapes) if argument == "SHAPES" else argument for argument in asked]
    assert words in run("fleet", "tune", *given, *([] if "--db" in asked else SERVER)).complaint


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_an_engine_that_is_not_installed_is_one_line(
    run: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda _: None)
    said = run("fleet", "tune", "--on", name, "--shapes", shapes, *SERVER).complaint
    assert f"--on {name} needs the Python package '{package}'" in said and f"pip install 'autotax[{name}]'" in said


def test_neither_engine_is_imported_without_need() -> None:
    code = (
        "import sys, autotax.cli.app, autotax.fleet.driver, autotax.fleet.worker, autotax.fleet.tuner_process,"
        "autotax.fleet.screen,"
        "autotax.fleet.queue; print({'ray', 'submitit', 'torch', 'triton'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
    assert ran.stdout == "set()\n"


def test_the_command_explains_itself(run: Run) -> None:
    assert "fleet" in run("--help").out and "tune" in run("fleet", "--help").out
    assert all(option in run("fleet", "tune", "--help").out for option in ("--on", "--shapes", "--misses", "--lease"))


def test_a_whole_fleet_by_the_command(run: Run, shapes: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []

    def open_engine(asked: EngineOptions) -> Threads:
        engines.append((asked, made := Threads(StandInBench(), StandInBench())))
        return made

    monkeypatch.setattr(driver, "open_engine", open_engine)
    done = run("fleet", "tune", "--on", "slurm", "--hosts", 2, "--slurm", "partition=h200", "--slurm", "requeue", "--db", url,
               "--shapes", shapes, "--trials", 7, "--lease", "6s")  # fmt: skip
    ((asked, threads),) = engines
    assert done.code == 0 and "problem tuned" in done.err, done
    assert (asked.engine, asked.hosts, asked.parameters) == ("slurm", 2, {"partition": "h200", "requeue": True})
    jobs = [job for bench in threads.benches for job in bench.jobs]
    assert sorted(job.problem.m for job in jobs) == [16, 32, 48] and {job.settings.trials for job in jobs} == {7}
    again = run("fleet", "tune", "--on", "slurm", "--hosts", 1, "--db", url, "--shapes", shapes, "--json")
    assert '"event": "done"' in again.out and again.code == 0


def test_ranks_unless_given_are_the_gpus_of_each_kind(tmp_path: Path) -> None:
    (path := tmp_path / "s.toml").write_text("[[all-gather-gemm]]\nm = 512\nn = 512\nk = 512\n")
    kinds = (H200, replace(H200, count=8))
    options = ProblemOptions(), DeployOptions(), SearchOptions(shapes=path), MachineOptions()
    sizes = [jobs_on(kind, *options)[0].problem.world_size for kind in kinds]
    assert sizes == [4, 8]


def test_a_problem_that_does_not_fit_a_kind_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = "[[all-gather-gemm]]\nm = 512\nn = 512\nk = 512\nworld_size = {}\n"
    (path := tmp_path / "s.toml").write_text(table.format(8) + table.format(4))
    (job,) = jobs_on(H200, ProblemOptions(), DeployOptions(), SearchOptions(shapes=path), MachineOptions())
    assert job.problem.world_size == 4 and "is left out on 4 x NVIDIA H200" in capsys.readouterr().err


def test_misses_of_a_kind_are_due_on_it(url: str) -> None:
    from datetime import UTC, datetime

    from autotax.core.conditions import Conditions
    from autotax.db.records import MissRecord
    from autotax.operators.problems import AllGatherGemm

    asked = [AllGatherGemm(m, 512, 512, world_size=4) for m in (128, 256)]
    with Store.open(url) as store:
        moment = datetime.now(UTC)
        usual = Conditions()
        store.add_misses([MissRecord(asked[0], H200, usual, 3, moment), MissRecord(asked[1], GPUS, usual, 9, moment)])
    (job,) = jobs_on(H200, ProblemOptions(), DeployOptions(), SearchOptions(misses=True), MachineOptions(db=url))
    assert job.problem == asked[0] and job.settings.conditions == Conditions()


def test_hosts_of_an_address() -> None:
    asked = FleetOptions(on="ray:10.0.0.1:6379", wait="2m").asked("cpu")
    assert (asked.engine, asked.address, asked.wait_s, asked.backend) == ("ray", "10.0.0.1:6379", 120.0, "cpu")
