"""Another user of the host tries every port, socket and file of ranks that start; an old store on a port lets it in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotax.core.errors import MachineError
from autotax.heap.world import NAME, Meeting, meet
from autotax.runner import processes
from tests.adversarial.stranger import NOBODY

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def attacked(starts: int, folder: Path) -> dict[str, Any]:
    folder.chmod(0o777)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.adversarial.stranger", str(starts), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120 + 70 * starts)
    if "no network namespace" in run.stderr:
        pytest.skip("a network namespace of its own is refused")
    assert run.returncode == 0, run.stderr
    print(run.stdout.splitlines()[-1])
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


@as_root
@pytest.mark.volume
def test_a_store_on_a_port_lets_a_stranger_in(tmp_path: Path) -> None:
    """The attack works where there is a way."""
    report = attacked(0, tmp_path)
    assert report["ways"] == ["a store on a port"] and report["unpickled"] == ["unpickled"]


@as_root
@pytest.mark.parametrize("starts", [2, pytest.param(100, marks=pytest.mark.volume)])
def test_no_stranger_gets_among_ranks(tmp_path: Path, starts: int) -> None:
    report = attacked(starts, tmp_path)
    assert report["ways"] == [] and report["unpickled"] == [] and report["attempts"] > 0, report
    # A stranger may keep ranks from starting; ranks that start have their own values.
    assert report["right"] + report["refused"] == starts, report


@pytest.fixture
def squatter() -> Iterator[tuple[str, int]]:
    """A listener of another user at the name of a shared fork server; the end that reads what it was sent."""
    name = f"squatted-{os.getpid()}"
    reading, writing = os.pipe()
    ready, sender = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(processes.address_of(name, {}))
                listener.listen(1)
                os.write(sender, b"1")
                client, _ = listener.accept()
                os.write(writing, client.recv(1 << 16))
        finally:
            os._exit(0)
    os.close(writing)
    os.read(ready, 1)
    yield name, reading
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    for fd in (reading, ready, sender):
        os.close(fd)


@as_root
def test_a_squatter_of_the_fork_servers_name_gets_nothing(squatter: tuple[str, int]) -> None:
    name, reading = squatter
    with pytest.raises(PermissionError, match=f"taken by user {NOBODY}"):
        processes._connected(processes.address_of(name, {}))
    assert os.read(reading, 1 << 16) == b""


def test_a_meeting_place_is_a_memory_file_of_ours(tmp_path: Path) -> None:
    meeting = Meeting()
    meet(meeting.address).set("key", "value")
    assert meet(meeting.address).get("key") == b"value"
    meeting.close()
    meeting.close()
    with pytest.raises(MachineError, match="cannot be opened"):
        meet(meeting.address)
    plain = tmp_path / NAME
    plain.touch()
    with pytest.raises(MachineError, match="must be a memory file"):
        meet(str(plain))


@as_root
def test_a_meeting_place_of_another_user_is_refused() -> None:
    fd = os.memfd_create(NAME)
    os.fchown(fd, NOBODY, NOBODY)
    try:
        with pytest.raises(MachineError, match=f"of user {NOBODY}; it must be"):
            meet(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)
