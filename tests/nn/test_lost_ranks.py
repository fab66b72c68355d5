"""A rank that dies under a tuned call: the others wait for a bounded time, `failure()` says for whom, the next call raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from autotax.core.errors import MachineError, UsageError
from autotax.heap.world import Meeting
from autotax.nn import groups
from autotax.nn.groups import MOST_WAIT_S, VARIABLE, Watchdog, wait_s
from autotax.nn.prepare import GPU_POLLS_PER_S, MOST_POLLS
from autotax.runner.ranks import Ranks

WAIT_S = 2.0
PATIENCE_S = 250.0
"""Limit for steps that usually take seconds; a busy machine stays below it, too."""


@pytest.mark.volume
def test_a_peer_that_dies_ends_calls_in_a_bounded_time(tmp_path: Path) -> None:
    meeting = Meeting()
    more = {VARIABLE: str(WAIT_S), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.nn.bereaved", meeting.address]
    environment = os.environ | more | {"AUTOTAX_DB": str(tmp_path / "none.db")}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        out, complaints = ranks[0].communicate(timeout=200)
        assert ranks[0].returncode == 0, complaints
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for name, report in json.loads(out.splitlines()[-1]).items():
        assert report["seconds"] < PATIENCE_S, (name, report)
        assert "rank 0 waited for flag" in report["failure"] and "of rank 1" in report["failure"], (name, report)
        assert report["failure"] in report["next"] and f"{VARIABLE}=2" in report["next"], (name, report)
        assert report["after"] == report["next"] and "\n" not in report["next"], (name, report)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e9", "2401"])
def test_a_wait_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=VARIABLE):
        wait_s()


def test_the_wait_is_ten_minutes_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", " "):
        monkeypatch.setenv(VARIABLE, text)
        assert wait_s() == 600
    monkeypatch.setenv(VARIABLE, "2.5")
    assert wait_s() == 2.5


class Stand:
    """Stands in for a module on a GPU, whose notes reach the host by copies."""

    def __init__(self) -> None:
        self.control = torch.zeros(16, dtype=torch.int32)
        self.due = False
        self.watchdog = Watchdog([self.control], self.failure, self.request)
        self.watchdog.copies = torch.zeros(1, 5, dtype=torch.int32)

    def request(self, due: bool) -> None:
        self.due = due

    def failure(self) -> str | None:
        return "rank 0 waited for flag 1 of rank 1: needed 1, saw 0" if self.control[4] else None


def test_on_a_gpu_calls_look_when_they_are_asked_to_and_no_other_call_pays() -> None:
    stand = Stand()
    watching = stand.watchdog
    watching.look()
    assert not stand.due, "the next calls do not look"
    stand.control[4] = 1
    watching.request_look()
    assert stand.due
    watching.look()  # enqueues the copy that the next look reads
    watching.request_look()
    for _ in range(2):
        with pytest.raises(MachineError, match="of rank 1"):
            watching.look()
        assert stand.due, "every later call raises"


def test_modules_on_gpus_are_asked_to_look_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LOOK_S", 0.01)
    monkeypatch.setattr(groups, "_thread", None)
    stand = Stand()
    watching = stand.watchdog
    groups.watch(watching)
    for _ in range(2):
        watching.look()
        deadline = time.monotonic() + PATIENCE_S
        while not stand.due:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def listening(pids: list[int]) -> list[str]:
    """The addresses at which processes listen."""
    addresses = [socket.laddr.ip for pid in pids for socket in psutil.Process(pid).net_connections() if socket.status == "LISTEN"]
    assert addresses
    return addresses


def pid(_: object) -> int:
    return os.getpid()


def test_ranks_of_one_host_listen_on_the_loopback_alone() -> None:
    with Ranks(2) as ranks:
        ranks.run(pid)
        assert set(listening([os.getpid(), *ranks.pids])) == {"127.0.0.1"}


def test_the_longest_wait_fits_the_counter_of_a_kernel() -> None:
    """The most patient waits last four times as long as others. With 600 s the counter of `push_packets` overflowed."""
    limit = min(int(MOST_WAIT_S * GPU_POLLS_PER_S), MOST_POLLS)
    assert torch.tensor([4 * limit], dtype=torch.int32).item() == 4 * limit
