"""Faults of the machine during a run, and their messages: full disks, killed ranks, slow ranks, too little memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotax.core.errors import MachineError
from autotax.runner import Effort, LiveRunner
from autotax.runner.messages import CompilerAnswer, Job
from autotax.runner.precompile import CompileAhead
from autotax.runner.yardsticks import Watch
from tests.runner.small import CPU, FAULTS, GEMM, measure

PATIENCE_S = 250.0
"""Limit in seconds; a lost group is noticed much earlier, even on a busy machine."""
NO_ROOM = replace(GEMM, n=56)
"""The problem whose inputs do not fit on rank 1 (see short_of_memory)."""


@pytest.mark.volume
@pytest.mark.parametrize("fault", ["full_disk", "full_disk_at_compile"])
def test_a_full_disk_is_no_fault_of_a_config(runner: LiveRunner, fault: str) -> None:
    with pytest.raises(MachineError, match=r"the disk is full on rank 1 .*: free space and run the same command again"):
        measure(runner, fault)
    assert not runner.pool.ranks
    with pytest.raises(MachineError):
        measure(runner, "bsp", fault)
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


def test_a_disk_that_is_full_for_the_compilers_is_no_fault_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveRunner(CPU, 2)
    live.compilers = CompileAhead(CPU, 0)
    answer = CompilerAnswer("OSError: [Errno 28] No space left on device")
    monkeypatch.setattr(live.compilers, "outcome", lambda *_: answer)
    with pytest.raises(MachineError, match="the disk is full where kernels are compiled"):
        measure(live, "bsp")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.volume)], ids=lambda number: number.name
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_or_stopped_in_mid_trial_costs_that_trial(
    runner: LiveRunner, rank: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number == signal.SIGSTOP:  # which ends at the deadline
        monkeypatch.setattr(runner, "deadline_s", 5.0)
    measure(runner, "bsp")
    victim = runner.pool.ranks[rank]
    sampling, since = threading.Event(), time.monotonic()

    def strike() -> None:
        while victim.stage != "sampling" and time.monotonic() < since + PATIENCE_S:
            time.sleep(0.01)
        sampling.set()
        os.kill(victim.child.process.pid, number)

    threading.Thread(target=strike).start()
    (hit,) = measure(runner, "dawdles", effort=Effort(samples=1000, seconds=4.0))
    assert sampling.is_set() and time.monotonic() - since < PATIENCE_S
    assert hit.status == ("crash" if number == signal.SIGKILL else "hang"), hit.error
    assert f"rank {rank} " in (hit.error or "") and "'sampling'" in (hit.error or "")
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


@pytest.mark.parametrize(
    ("name", "change"),
    [("seed", {"seed": 99}), pytest.param("effort", {"effort": Effort(samples=9)}, marks=pytest.mark.volume)],
)
def test_ranks_that_do_not_do_the_same_say_what_differs(
    runner: LiveRunner, monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, Any]
) -> None:
    measure(runner, "bsp")
    pipe = runner.pool.ranks[1].pipe
    send = pipe.send

    def send_changed(job: Job) -> None:
        send(replace(job, **change))

    monkeypatch.setattr(pipe, "send", send_changed)
    (odd,) = measure(runner, "bsp")
    assert odd.status == "crash"
    assert f"the ranks are out of step: {name} is " in (odd.error or "")
    assert "on rank 0" in (odd.error or "") and f"{change[name]} on rank 1" in (odd.error or "")
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


@pytest.fixture
def short_of_memory() -> Iterator[LiveRunner]:
    live = LiveRunner(CPU, 2, deadline_s=120.0, modules=("tests.runner.short_of_memory",))
    yield live
    live.close()


def test_inputs_that_do_not_fit_cost_neither_the_ranks_nor_the_next_problem(short_of_memory: LiveRunner) -> None:
    measurements = measure(short_of_memory, "bsp", "bsp", problem=NO_ROOM)
    assert [m.status for m in measurements] == ["out_of_resources"] * 2
    assert all("inputs: OutOfMemoryError: as the test wants it" in (m.error or "") for m in measurements)
    (after,) = measure(short_of_memory, "bsp")
    assert after.status == "ok" and short_of_memory.restarts == 0


def test_a_slow_rank_is_noticed() -> None:
    """The next test shows that a quiet machine gives no such message: a machine that runs tests may never be quiet."""
    live = LiveRunner(CPU, 2, modules=FAULTS)
    try:
        (usual,) = measure(live, "bsp")
        assert len(usual.conditions["yardstick_us"]) == 2
        assert all(0 < rate < 10_000 for rate in usual.conditions["copy_gbps"])
        (burdened,) = measure(live, "burdened")
        assert burdened.status == "ok", burdened.error
        assert any(notice.startswith("rank 1 is ") and "slower than the others" in notice for notice in burdened.notices)
    finally:
        live.close()


def test_a_slow_rank_and_lower_clocks_are_told_apart() -> None:
    watch = Watch(on_gpu=True)
    assert watch.note([60.0, 61.0, 62.0, 60.0]) == ()
    (slow,) = watch.note([60.0, 61.0, 80.0, 60.0])
    assert slow.startswith("rank 2 is 33% slower than the others at fixed work")
    (throttled,) = watch.note([69.0, 70.0, 71.0, 69.0])
    assert throttled.startswith("all ranks are 15% slower than at their best")
    assert watch.note([60.0, 70.0, 70.0, 70.0]) == (), "one rank is as fast as ever"
