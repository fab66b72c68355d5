"""Counts of a server's process: published, shown by `autotax status`, and told in its log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotax.engines import plugin
from tests.cli.conftest import Run, db, run  # noqa: F401 - fixtures
from tests.volume import volume

SERVER = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from autotax.engines import plugin
from autotax.torch.plans import count_of
plugin.EVERY_S, plugin.QUIET_S = 0.05, 0.2
if sys.argv[1] == "calls":
    count_of("fused_matmul_all_reduce", "([16, 64])", "push(comm=8)").calls += 12
    count_of("fused_matmul_all_reduce", "([50, 64])", "torch", "BSP is the fastest").calls += 3
plugin.publish("vLLM")
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("calls", "12 of 15 calls of vLLM ran tuned kernels"),
        *volume(("silence", "0 calls: vLLM emitted no fused operator, so nothing is taken")),
    ],
)
def test_a_server_publishes_its_counts_and_logs_a_line(tmp_path: Path, run: Run, kind: str, line: str) -> None:  # noqa: F811
    here = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, kind], env=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as server:  # fmt: skip
        assert server.stdout and server.stdout.readline() == "up\n"
        ends = time.monotonic() + 280
        while not plugin.published(server.pid) and time.monotonic() < ends:
            time.sleep(0.05)
        result, document = run("status", server.pid), run("status", "--json").results
        assert server.stderr
        log = next(said for said in server.stderr if line in said)
        server.communicate("", timeout=280)
    assert result.code == 0 and f"process {server.pid}: {line}" in result.err
    assert f"autotax: {line}; `autotax status {server.pid}` counts on" in log
    assert ("BSP is the fastest" in result.out) == (kind == "calls") and document[0]["framework"] == "vLLM"
    ended = run("status", server.pid)
    assert ended.code == 1 and f"process {server.pid} publishes no counts" in ended.err


def test_damaged_counts_are_refused_in_one_line(run: Run) -> None:  # noqa: F811
    plugin.folder().mkdir(parents=True)
    (plugin.folder() / f"{os.getpid()}.json").write_text('{"pid": "all"}')
    assert "holds no counts" in run("status").complaint
    (plugin.folder() / "notes.json").write_text("")  # no file of ours
