"""Ranks that wait for a group to be lost: the next group is made of them, and nothing else is different."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from autotax.runner import LiveRunner
from autotax.runner.child import Child
from tests.runner.small import CPU, FAULTS, measure

TUNER = """
import time
from autotax.runner.pool import RankPool
from tests.runner.small import CPU
pool = RankPool(CPU, 1, 1 << 20, spares=True)
pool.start()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def runner() -> Iterator[LiveRunner]:
    live = LiveRunner(CPU, 2, modules=FAULTS)
    live.pool.spares = True
    yield live
    assert _spares(live) and _ranks(live)
    live.close()
    live.close()
    assert not _spares(live) and not _ranks(live)


def _ranks(runner: LiveRunner) -> set[int]:
    return {rank.child.process.pid for rank in runner.pool.ranks}


def _status(runner: LiveRunner, variant: str) -> str:
    (measurement,) = measure(runner, variant)
    return measurement.status


def _spares(runner: LiveRunner) -> set[int]:
    found = psutil.Process().children()
    return {child.pid for child in found if "autotax.runner.rank" in child.cmdline()} - _ranks(runner)


@pytest.mark.volume
def test_spares_are_the_next_group(runner: LiveRunner) -> None:
    assert _status(runner, "bsp") == "ok"
    spares = _spares(runner)
    assert len(spares) == 2
    assert _status(runner, "killed") == "crash"
    assert _spares(runner) == spares, "a loss is not their end"
    assert _status(runner, "bsp") == "ok"
    assert _ranks(runner) == spares and len(_spares(runner)) == 2


@pytest.mark.volume
def test_a_group_comes_up_without_its_spares(runner: LiveRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _status(runner, "bsp") == "ok"
    dead, other = (psutil.Process(pid) for pid in _spares(runner))
    dead.kill()
    assert _status(runner, "exits") == "crash"
    monkeypatch.setattr(Child, "start", _no_more_than(3))
    assert _status(runner, "bsp") == "ok", "what is missing is started anew"
    assert not other.is_running(), "no group is of processes of several times"
    assert len(_spares(runner)) == 1, "a machine that gives no more processes harms nobody"


def _no_more_than(count: int) -> Callable[..., Child]:
    start, left = Child.start, [None] * count

    def refusing(*arguments: Any) -> Child:
        if not left:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left.pop()
        return start(*arguments)

    return refusing


@pytest.mark.volume
def test_a_spare_ends_when_it_is_no_longer_wanted() -> None:
    environment = {"TRITON_INTERPRET": "1"}
    first, second = (Child.start("autotax.runner.rank", (), environment) for _ in range(2))
    try:
        first.pipe.close()
        assert first.process.wait(60) == 0, "though the other was started while that pipe was open"
        assert second.process.poll() is None
    finally:
        second.kill()


def test_a_tuner_that_is_killed_leaves_no_spare() -> None:
    tuner = subprocess.Popen([sys.executable, "-c", TUNER], stdout=subprocess.PIPE, text=True)
    assert tuner.stdout
    with tuner, tuner.stdout:
        assert tuner.stdout.readline() == "up\n"
        left = psutil.Process(tuner.pid).children(recursive=True)
        assert len(left) == 2
        tuner.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
