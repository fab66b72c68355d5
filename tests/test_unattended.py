"""A short unattended run on CPU ranks: faults in the ranks, a tuner that is killed, and nothing lost or left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    found = json.loads(report.read_text())
    assert all(each["finished"] and each["winner"] for each in found["problems"]) and len(found["problems"]) == 2
    assert sum(fault["times"] for fault in found["faults"].values()) >= 3 and found["kills"] >= 1
    assert found["complaints"] == [] and found["left"]["processes"] == []
