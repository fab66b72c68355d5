"""`results/tables.py` on two CPU ranks: it ends with its time, goes on where it ended, and leaves out what is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHAPES = """
all-reduce-norm = [{m = 4, hidden = 64, dtype = "fp32"}]
head-gather = [{batch = 2, heads = 4, head_dim = 16, dtype = "fp32"}]
"""


def tables(folder: Path, *options: str) -> str:
    """The output of a call of the script."""
    shapes = folder / "shapes.toml"
    shapes.write_text(SHAPES)
    settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "results/tables.py", str(folder), "--gpus", "2", "--shapes", str(shapes)]
    few = ["--short", "--each", "60", "--trials", "2", "--soak", "2"]
    ended = subprocess.run(
        [*command, *few, *options], cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    first = tables(tmp_path, "--seconds", "0")
    assert "0 problems are done, 2 to come" in first and "1 problems are done; the tables" in first
    assert "1 problems are done, 1 to come" in tables(tmp_path)
    assert "2 problems are done, 0 to come" in tables(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "comparisons.jsonl").read_text().splitlines()]
    assert sorted(row["problem"]["op"] for row in rows) == ["all-reduce-norm", "head-gather"]
    page = (tmp_path / "tables.md").read_text()
    assert all(f"| {row['key']} |" in page for row in rows) and "| operator | problems |" in page
