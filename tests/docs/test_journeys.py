"""The pages of a newcomer, followed word by word on CPU ranks: a first table, a first kernel, what a server will ask for."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.test_architectures import LLAMA_70B
from tests.volume import volume

ROOT = Path(__file__).parents[2]


def commands(page: str, section: str) -> list[list[str]]:
    """The commands of the blocks of a section, as words."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    blocks = "".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in blocks.splitlines() if line.strip()]


def follow(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command of a page, with this Python in place of the page's."""
    program = {"autotax": ["-m", "autotax"], ".venv/bin/autotax": ["-m", "autotax"], "python": []}[words[0]]
    here = os.environ | {"PYTHONPATH": str(ROOT), "AUTOTAX_DB": str(folder / "own.db"), "CUDA_VISIBLE_DEVICES": ""}
    here["XDG_CACHE_HOME"] = str(folder / "cache")  # processes of other tests are none of its servers
    line = [sys.executable, *program, *words[1:]]
    return subprocess.run(line, cwd=folder, env=here, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.volume
def test_the_first_table_of_a_performance_engineer(tmp_path: Path) -> None:
    (small,) = [words for words in commands("README.md", "Quick start") if "fp32" in words]
    ran = follow(tmp_path, small)
    assert ran.returncode == 0 and "vs BSP" in ran.stdout and "4 trials" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.volume
@pytest.mark.parametrize("section", ["A first operator", "A first variant"])
def test_the_first_kernel_of_an_author(tmp_path: Path, section: str) -> None:
    for words in commands("docs/own-kernels.md", section):
        ran = follow(tmp_path, words)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    if section == "A first variant":
        (listed,) = commands("docs/own-kernels.md", "When it fails")
        assert follow(tmp_path, listed).returncode == 0


def test_the_timed_journeys_are_those_of_the_page_and_end_at_their_limit(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "results/first-hour/journeys.py"))
    timed = script["journeys"](ranks=2)
    for section in ("A first operator", "A first variant"):
        lines = [shlex.split(line) for line in timed[section.lower()]]
        assert [words for words in commands("docs/own-kernels.md", section) if words[0] == "autotax"] == lines
    cut = script["run"](timed["a first table"][0], tmp_path, 2.0)
    assert cut.code is None and cut.seconds < 60


@pytest.mark.parametrize("page", ["docs/vllm.md", *volume("docs/sglang.md")])
def test_what_the_server_of_a_model_developer_will_ask_for(tmp_path: Path, page: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert commands(page, "Install") == [["pip", "install", "autotax"], ["autotax", "doctor"]], "with all that it needs"
    planned, tuned = commands(page, "Tune")
    ran = follow(tmp_path, planned)
    assert ran.returncode == 0 and "8 x NVIDIA H100" in ran.stdout and "expected: " in ran.stdout, ran.stderr
    assert tuned == [word for word in planned if word not in ("--dry-run", "--hardware", "h100x8")]
    status = [words for words in commands(page, "See that it is active") if words[0] == "autotax"]
    assert "publishes" in follow(tmp_path, status[0]).stderr
