"""Processes of a fork server behave like ordinary ones, start at once, and end with the client that requested them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autotax.core.children import import_path
from autotax.runner import processes
from autotax.runner.local_runner import RankPool
from autotax.runner.processes import INTERPRETED, SHARED, Child, Forked, ForkServer
from tests.runner.small import CPU
from tests.volume import volume

CHILD = "tests.runner.forked"
TUNER = """
import time
from autotax.runner.local_runner import RankPool
from tests.runner.small import CPU
pool = RankPool(CPU, 1, 1 << 20)
pool.start()
print(pool.ranks[0].child.process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()
    server.close()


def started(server: ForkServer, *arguments: str, **environment: str) -> Child:
    child = server.child(CHILD, arguments, INTERPRETED | environment)
    assert isinstance(child.process, Forked)
    return child


def seen(child: Child) -> dict[str, object]:
    child.pipe.send("what do you see?")
    view = child.pipe.recv()
    assert isinstance(view, dict)
    return view


def test_a_fork_has_the_arguments_the_environment_and_the_folder_of_its_client(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTAX_A_VARIABLE", "of mine")
    child = started(server, "one", "two", AUTOTAX_ANOTHER="for it")
    view = seen(child)
    assert view["arguments"] == ["one", "two"] and view["folder"] == str(tmp_path)
    assert view["environment"] == dict(os.environ) | {
        "AUTOTAX_ANOTHER": "for it", processes.PARENT: str(view["parent"]), "PYTHONUNBUFFERED": "1", **INTERPRETED,
        "PYTHONPATH": import_path(),
    }  # fmt: skip
    assert view["group"] == child.process.pid, "it can be killed with all that it starts"
    child.kill()


def test_each_fork_begins_as_the_server_did_and_not_as_the_last_one(server: ForkServer) -> None:
    first = started(server, AUTOTAX_LEFT="by the first")
    seen(first)
    second = started(server)
    view = seen(second)
    assert "AUTOTAX_LEFT" not in view["environment"] and view["descriptors"] == seen(first)["descriptors"]  # type: ignore[operator]
    first.kill()
    assert second.process.poll() is None and seen(second) == view
    second.kill()


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("leave", "exited with code 0: it printed nothing"),
        ("raise", "exited with code 1: ValueError: as the test wants it"),
        ("exit", "exited with code 3: and says so"),
        ("abort", "was killed by SIGABRT: "),
    ],
)
def test_how_a_fork_ended_is_told_without_words_of_earlier_tasks(server: ForkServer, last: str, words: str) -> None:
    child = started(server)
    child.send("speak")
    assert child.pipe.recv() == "speak"
    child.send(last)
    with pytest.raises(EOFError):
        child.pipe.recv()
    assert child.last_words().startswith(words)
    assert child.process.poll() is not None
    child.kill()


def test_a_fork_is_killed_with_all_that_it_started(server: ForkServer) -> None:
    child = started(server)
    child.pipe.send("start another")
    other = psutil.Process(child.pipe.recv())
    child.kill()
    assert child.process.poll() == -signal.SIGKILL
    assert _ended(other)
    child.kill()


def test_a_fork_that_ends_leaves_nothing_behind(server: ForkServer) -> None:
    child = started(server)
    child.pipe.send("start another")
    other = psutil.Process(child.pipe.recv())
    child.pipe.send("leave")
    assert child.process.wait(60) == 0
    assert _ended(other)
    child.kill()


def test_a_fork_that_cannot_answer_is_killed(server: ForkServer) -> None:
    child = started(server)
    seen(child)
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.1)
    child.kill()
    assert child.process.poll() == -signal.SIGKILL


@pytest.mark.volume
def test_a_server_that_is_killed_takes_its_forks_with_it_and_processes_of_their_own_replace_them(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED)
    child = started(server)
    fork = psutil.Process(child.process.pid)
    ours = fork.parent()
    assert ours and ours.ppid() == os.getpid() and ours.name() == "autotax-server"
    ours.kill()
    assert child.process.wait(60) == -signal.SIGKILL and _ended(fork)
    assert child.last_words().startswith("was killed by SIGKILL")
    child.kill()
    other = server.child(CHILD, (), INTERPRETED)
    assert not isinstance(other.process, Forked) and seen(other)
    other.kill()


def test_a_client_that_is_killed_takes_its_forks_with_it() -> None:
    """The server of a test run, which outlives the client."""
    tuner = subprocess.Popen([sys.executable, "-c", TUNER], stdout=subprocess.PIPE, text=True)
    assert tuner.stdout and os.environ[SHARED]
    with tuner, tuner.stdout:
        rank = psutil.Process(int(tuner.stdout.readline()))
        name, others = rank.name(), psutil.Process(tuner.pid).children()
        tuner.kill()
    assert name == "autotax-rank" and not others, "it is a child of the shared server"
    assert _ended(rank)


@pytest.mark.volume
def test_a_client_that_is_killed_takes_its_own_server_with_it() -> None:
    alone = {name: value for name, value in os.environ.items() if name != SHARED}
    tuner = subprocess.Popen([sys.executable, "-c", TUNER], stdout=subprocess.PIPE, text=True, env=alone)
    assert tuner.stdout
    with tuner, tuner.stdout:
        assert tuner.stdout.readline()
        left = psutil.Process(tuner.pid).children(recursive=True)
        names = sorted(process.name() for process in left)
        tuner.kill()
    assert names == ["autotax-rank", "autotax-server"]
    _, alive = psutil.wait_procs(left, timeout=280)
    assert not alive


def test_what_libraries_read_on_import_is_never_that_of_another_process(server: ForkServer) -> None:
    one, other, again = started(server), started(server, GPU_MAX_HW_QUEUES="7"), started(server, GPU_MAX_HW_QUEUES="7")
    servers = [psutil.Process(child.process.pid).ppid() for child in (one, other, again)]
    assert servers[0] != servers[1] == servers[2]
    for child in (one, other, again):
        child.kill()


@pytest.mark.parametrize("name", ["of nobody \udcff", *volume("x" * 5000)])
def test_where_no_server_has_that_name_there_is_one_of_our_own(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(SHARED, name)
    child = started(server)
    ours = psutil.Process(child.process.pid).parent()
    assert ours and ours.ppid() == os.getpid()
    child.kill()


@pytest.mark.parametrize("words", ["", "not a request"])
def test_a_request_that_is_none_harms_nobody(server: ForkServer, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    seen(first := started(server))
    with monkeypatch.context() as patch:
        patch.setattr(processes.json, "dumps", lambda _: words)
        cut = server.child(CHILD, (), INTERPRETED)
    assert not isinstance(cut.process, Forked), "what no server forks is a process of its own"
    seen(second := started(server))
    for child in (first, second, cut):
        child.kill()


def test_a_module_that_is_not_there_is_told(server: ForkServer) -> None:
    child = server.child("no.such.module", (), INTERPRETED)
    with pytest.raises(EOFError):
        child.pipe.recv()
    assert child.last_words() == "exited with code 1: ModuleNotFoundError: No module named 'no'"
    child.kill()


def test_no_rank_imports_again_what_the_server_has() -> None:
    pool = RankPool(CPU, 2, 1 << 20)
    try:
        for _ in range(2):
            pool.start()
            for pid in (rank.child.process.pid for rank in pool.ranks):
                read = psutil.Process(pid).io_counters().read_chars
                assert read < 8e6, "importing torch and Triton reads tens of megabytes"
    finally:
        pool.close()


def _ended(process: psutil.Process) -> bool:
    _, alive = psutil.wait_procs([process], timeout=280)
    return not alive
