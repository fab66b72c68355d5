"""Skeletons of operators and variants: at most 60 lines, right as they are, and their failures are loud."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

pytestmark = pytest.mark.volume

ROOT = Path(__file__).parents[2]
SIZES = {"operator": "my-sum --n 512", "variant": "all-gather-gemm --m 64 --n 96 --k 64 --variants my-push"}
NAMES = {"operator": "my-sum", "variant": "my-push"}


def autotax(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    here = os.environ | {"PYTHONPATH": str(ROOT), "AUTOTAX_DB": str(folder / "own.db"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "autotax", *arguments]
    return subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("kind", SIZES)
def test_a_skeleton_runs_as_it_is_and_an_error_in_it_is_loud(tmp_path: Path, kind: str) -> None:
    made = autotax(tmp_path, "new", kind, NAMES[kind])
    file, test = (tmp_path / name for name in made.stdout.split())
    assert made.returncode == 0 and f"--load {file.name}" in made.stderr
    assert sum(bool(line) for line in file.read_text().splitlines()) <= 60 and "check_operator(" in test.read_text()
    tune = ["tune", *SIZES[kind].split(), "--dtype", "fp32", "--trials", "2", "--soak", "2", "--load", file.name]
    tuned = autotax(tmp_path, *tune)
    assert tuned.returncode == 0 and "2 trials (2 ok)" in tuned.stdout, tuned.stdout + tuned.stderr
    text = file.read_text()
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "leave(control" in line)
    file.write_text(text.replace("leave(control, epoch, programs, TARGET)", "leave(control, epoch, programms, TARGET)"))
    broken = autotax(tmp_path, *tune, "--fresh")
    assert broken.returncode == 1 and "Traceback" not in broken.stderr
    assert f"name 'programms' is not defined\") ({file.name}:{line});" in broken.stderr
    shown = broken.stderr.partition("`")[2].partition("`")[0].split()
    whole = autotax(tmp_path, *shown[1:])
    assert f'{file.name}", line {line}' in whole.stdout and "Traceback (most recent call last)" in whole.stdout


@pytest.mark.volume
@pytest.mark.parametrize("kind", SIZES)
def test_the_test_of_a_skeleton_passes(tmp_path: Path, kind: str) -> None:
    test = autotax(tmp_path, "new", kind, NAMES[kind]).stdout.split()[1]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    ran = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout


def test_names_that_cannot_be_are_refused(run: Run, tmp_path: Path) -> None:
    for arguments, words in {
        ("operator", "My Sum"): "name is 'My Sum'; allowed are a-z",
        ("operator", "json"): "is a module here already",
        ("operator", "torch"): "is a module here already",
        ("operator", "flash-decode"): "operator 'flash-decode' exists",
        ("variant", "push"): "has a variant 'push'",
        ("variant", "mine", "--folder", str(tmp_path / "none")): "is not there",
    }.items():
        assert words in run("new", *arguments).complaint
    (tmp_path / "mine.py").touch()
    assert "exists" in run("new", "variant", "mine", "--folder", tmp_path).complaint
