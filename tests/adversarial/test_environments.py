"""Hostile environments: the same answer as in a friendly one, or exit code 2 and one line; and users without a home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from autotax.core.terminal import settle_sizes
from autotax.db import Store, formats
from tests.adversarial.environments import HostileEnvironment, environments
from tests.adversarial.test_command_lines import complaint
from tests.cli.conftest import Run, Tuner, db, ranks, run, tuner  # noqa: F401
from tests.db.conftest import keep_winner
from tests.db.test_exchange import an_entry

ROOT = Path(__file__).parents[2]
SAMPLE, VOLUME, IN_PROCESSES = 25, 250, 40
GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64"]
COMMANDS = [["lookup", *GEMM, "--json"], ["winners", "--json"], ["lookup", *GEMM], ["trials"], ["export", "-o", "winners.json"]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a database that holds a winner."""
    monkeypatch.chdir(tmp_path)
    with Store.open(tmp_path / "full.db") as store:
        keep_winner(store)
    return tmp_path


def wrong(hostile: HostileEnvironment, line: list[str], got: tuple[int, str, str], friendly: tuple[int, str, str]) -> str | None:
    """Describes the fault of an answer, or returns None."""
    code, out, err = got
    if hostile.refused:
        return complaint(code, "" if "--json" in line else out, err)
    if code != 0 or err != friendly[2]:
        return f"exit code {code}, {err[-300:]!r}"
    if "--json" in line and json.loads(out)["results"] != json.loads(friendly[1])["results"]:
        return f"another answer: {out[:300]!r}"
    if "-o" in line:
        formats.read(Path("winners.json"))  # whatever the user is called
    return None if out else "no answer"


@pytest.mark.parametrize("amount", [SAMPLE, pytest.param(VOLUME, marks=pytest.mark.volume)])
def test_hostile_environments(run: Run, folder: Path, amount: int) -> None:  # noqa: F811
    def answer(line: list[str], variables: dict[str, str | None]) -> tuple[int, str, str]:
        wanted = {"AUTOTAX_DB": str(folder / "full.db")} | variables
        with mock.patch.dict(os.environ, {name: value for name, value in wanted.items() if value is not None}):
            for name in (name for name, value in wanted.items() if value is None):
                os.environ.pop(name, None)
            settle_sizes()
            result = run(*line)
        return result.code, result.out, result.err

    friendly = [answer(line, {}) for line in COMMANDS]
    failures = []
    for number, hostile in enumerate(environments(amount, amount)):
        which = number // 5 % len(COMMANDS) if hostile.refused else number % len(COMMANDS)
        try:
            said = wrong(hostile, COMMANDS[which], answer(COMMANDS[which], hostile.variables), friendly[which])
        except BaseException as error:
            said = f"raised {type(error).__name__}: {str(error)[:200]}"
        if said:
            failures.append(f"{hostile}: {COMMANDS[which][0]} -> {said}")
    assert not failures, f"{len(failures)} of {amount}:\n" + "\n".join(failures)
    assert {path.name for path in folder.iterdir()} <= {"full.db", "winners.json"}


@pytest.mark.volume
@pytest.mark.timeout(1800)
def test_hostile_environments_of_processes(folder: Path) -> None:
    def answer(line: list[str], variables: dict[str, str | None]) -> tuple[int, str, str]:
        usual = os.environ | {"AUTOTAX_DB": str(folder / "full.db"), "PYTHONPATH": str(ROOT)}
        environment = {name: value for name, value in (usual | variables).items() if value is not None}
        command = [sys.executable, "-m", "autotax.cli.start", *line]
        done = subprocess.run(command, capture_output=True, env=environment, timeout=200, check=False)
        encoding = "utf-16" if environment.get("PYTHONIOENCODING") == "utf-16" else "latin-1"
        return done.returncode, done.stdout.decode(encoding), done.stderr.decode(encoding)

    friendly = [answer(line, {}) for line in COMMANDS]
    failures = []
    for number, hostile in enumerate(environments(IN_PROCESSES, 1, processes=True)):
        which = number // 5 % len(COMMANDS) if hostile.refused else number % len(COMMANDS)
        if said := wrong(hostile, COMMANDS[which], answer(COMMANDS[which], hostile.variables), friendly[which]):
            failures.append(f"{hostile}: {COMMANDS[which][0]} -> {said}")
    assert not failures, f"{len(failures)} of {IN_PROCESSES}:\n" + "\n".join(failures)


# A user without a home

NAMELESS = [
    *("setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"),
    *("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"),  # it may read the interpreter of whoever tests
]


def without_home(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """A command of a user whom /etc/passwd does not know, and who has no variable either."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv to become a user without a home")
    gone = ("HOME", "XDG_DATA_HOME", "AUTOTAX_DB")
    environment = {name: value for name, value in os.environ.items() if name not in gone} | {"PYTHONPATH": str(ROOT)}
    command = [*NAMELESS, sys.executable, "-m", "autotax.cli.start", *line]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=200, check=False)


def test_who_has_no_home_looks_up_what_is_shipped(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = without_home(tmp_path, "lookup", *GEMM)
    assert done.returncode == 0 and "there is no database" in done.stdout and not done.stderr, done
    assert not list(tmp_path.iterdir())


@pytest.mark.volume
@pytest.mark.parametrize(
    "line", [["winners"], ["trials"], ["export", "-o", "new"], ["report"], ["import", "x"], ["tune"], ["doctor"]]
)
def test_who_has_no_home_is_told_so(tmp_path: Path, line: list[str]) -> None:
    formats.write(tmp_path / "x", [an_entry()])
    (tmp_path / "x").chmod(0o644)
    tmp_path.chmod(0o777)
    done = without_home(tmp_path, *line)
    expected = {"winners": 0, "trials": 0, "export": 2, "report": 2, "import": 2, "tune": 2, "doctor": 1}[line[0]]
    assert done.returncode == expected, done
    assert "Traceback" not in done.stderr
    if expected == 2:
        assert complaint(done.returncode, done.stdout, done.stderr) is None and "--db" in done.stderr, done
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.volume
def test_a_database_that_is_named_needs_no_home(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with Store.open(tmp_path / "full.db") as store:
        keep_winner(store)
    (tmp_path / "full.db").chmod(0o666)
    done = without_home(tmp_path, "winners", "--db", "full.db", "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)["results"]) == 1, done
    done = without_home(tmp_path, "report", "--db", "full.db", "-o", "page.html", "--backend", "cuda")
    assert done.returncode == 0 and "</html>" in (tmp_path / "page.html").read_text(), done
