"""Bad command lines by a grammar: exit code 2, one line that a terminal shows and does not obey, nothing begun or kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from autotax.db import Store, formats
from tests.adversarial.grammar import lines, rules, write_bad_files
from tests.cli.conftest import Run, Tuner, db, ranks, run, tuner  # noqa: F401
from tests.db.conftest import keep_winner
from tests.db.test_exchange import an_entry

SAMPLE, VOLUME, IN_PROCESSES = 51, 800, 12
AMOUNTS = [SAMPLE, pytest.param(VOLUME, marks=pytest.mark.volume)]
MOST_SECONDS = 280.0
"""A line that takes longer than this is as good as a hang, however busy the machine is."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a good file of winners, a database that holds some, and bad files of shapes and models."""
    monkeypatch.chdir(tmp_path)
    formats.write(tmp_path / "good.json", [an_entry()])
    with Store.open(tmp_path / "full.db") as store:
        keep_winner(store)
    write_bad_files(tmp_path)
    return tmp_path


def kept(folder: Path) -> dict[str, int]:
    """Each file and its size."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def complaint(code: int, out: str, err: str) -> str | None:
    """Describes the fault of an answer to a bad command line, or returns None."""
    if code != 2:
        return f"exit code {code}, {err[:200]!r}"
    if out:
        return f"stdout {out[:100]!r}"
    if not err.startswith("autotax: ") or err.count("\n") != 1 or not err[:-1].isprintable():
        return f"stderr {err[:300]!r}"
    return None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("amount", AMOUNTS)
def test_bad_lines(run: Run, tuner: Tuner, folder: Path, amount: int) -> None:  # noqa: F811
    before, wrong, drawn, slowest = kept(folder), [], lines(amount, amount, folder), (0.0, "")
    for line in drawn:
        started = time.monotonic()
        try:
            result = run(*line.arguments)
            said = complaint(result.code, result.out, result.err)
        except BaseException as error:
            said = f"raised {type(error).__name__}: {str(error)[:200]}"
        seconds = time.monotonic() - started
        slowest = max(slowest, (seconds, str(line)))
        if not said and kept(folder) != before:
            said = "something was kept"
        if not said and seconds > MOST_SECONDS:
            said = f"took {seconds:.0f} s"
        if said:
            wrong.append(f"{line} -> {said}")
            before = kept(folder)
    print(f"{amount} lines, {len(wrong)} wrong; the slowest took {slowest[0]:.2f} s: {slowest[1]}")
    assert not wrong, f"{len(wrong)} of {amount}:\n" + "\n".join(wrong)
    assert not tuner.asked and not tuner.compared
    by_rule = Counter(line.rule for line in drawn)
    assert set(by_rule) == set(rules()), "every rule takes part"


@pytest.mark.parametrize("amount", [1, pytest.param(IN_PROCESSES, marks=pytest.mark.volume)])
def test_bad_lines_in_processes_of_their_own(folder: Path, amount: int) -> None:
    drawn = [line for line in lines(SAMPLE, 1, folder) if not any("\0" in word for word in line.arguments)]
    drawn = [line for line in drawn if max(map(len, line.arguments)) < 4000][:amount]
    environment = os.environ | {"AUTOTAX_DB": str(folder / "none.db"), "PYTHONPATH": str(Path(__file__).parents[2])}
    slowest = 0.0
    for line in drawn:
        command = [sys.executable, "-m", "autotax.cli.start", *(os.fsencode(word) for word in line.arguments)]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, env=environment, timeout=280, check=False)
        slowest = max(slowest, time.monotonic() - started)
        assert complaint(done.returncode, done.stdout.decode(), done.stderr.decode()) is None, str(line)
    print(f"{len(drawn)} lines in processes of their own; the slowest took {slowest:.2f} s")
