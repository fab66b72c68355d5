"""A sample of the starts of results/reliability: ranks that find different databases run one config."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.volume import volume

pytestmark = pytest.mark.volume

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("jobs", [6, *volume(60)])
def test_ranks_with_different_databases_run_one_config_and_have_equal_bits(jobs: int) -> None:
    command = [sys.executable, str(ROOT / "results/reliability/starts.py"), str(jobs), "--seed", "5"]
    environment = {name: value for name, value in os.environ.items() if name != "AUTOTAX_ONLY_OURS"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith(f"0 of {jobs} jobs had a fault; the greatest size ran ")
    assert "all_to_all" in ended.stdout or "push" in ended.stdout, "some start ran a winner"
