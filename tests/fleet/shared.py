"""Helpers of the tests with real engines and real ranks."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from autotax.core.problem import Problem
from autotax.db import Store
from autotax.hardware import Hardware
from autotax.operators.problems import AllGatherGemm

MARK = "AUTOTAX_FLEET_TEST"
"""Environment variable that all processes of a test inherit; it identifies leftovers."""
PROBLEMS: list[Problem] = [AllGatherGemm(m, 16, 32, "fp32", world_size=1) for m in (16, 32, 48)]
SHAPES = "".join(f'[[all-gather-gemm]]\nm = {m}\nn = 16\nk = 32\ndtype = "fp32"\nworld_size = 1\n' for m in (16, 32, 48))
TRIALS = 3
HERE = str(Path(__file__).parents[2])
"""The checkout."""


def left_running(mark: str) -> list[str]:
    """Command lines of the test's tuners, ranks and tasks that still run, whatever their parent is now."""
    commands = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        command = " ".join(process.info["cmdline"] or ()).replace(HERE, "")  # which a checkout may have called autotax
        ours = any(name in command for name in ("autotax", "tests.fleet", "submitit"))
        if ours and (process.info["environ"] or {}).get(MARK) == mark and process.pid != os.getpid():
            commands.append(command)
    return [command for command in commands if "pytest" not in command and "autotax-pg" not in command]


@contextmanager
def nothing_left(mark: str) -> Iterator[None]:
    yield
    wait_until(lambda: not left_running(mark), 15, lambda: str(left_running(mark)))


def wait_until(done: Callable[[], bool], seconds: float, tell: Callable[[], str] = lambda: "") -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, tell()
        time.sleep(0.1)


def searched(url: str) -> dict[tuple[str, int], Counter[str]]:
    """The number of trials of each config, by kind of hardware and problem: no trial may be lost or repeated."""
    with Store.open(url, create=False) as store:
        counts: dict[tuple[str, int], Counter[str]] = {}
        for trial in store.trials():
            assert trial.run
            if "stage" not in trial.conditions:
                key = trial.run.hardware.digest, trial.run.problem.m  # type: ignore[attr-defined]
                counts.setdefault(key, Counter())[trial.config.digest] += 1
        return counts


def assert_all_tuned_once(url: str, kinds: list[Hardware]) -> None:
    with Store.open(url, create=False) as store:
        winners = Counter((winner.hardware.digest, winner.problem) for winner in store.winners())
        done = Counter((run.hardware.digest, run.problem) for run in store.runs() if run.status == "done")
    once = {(kind.digest, problem): 1 for kind in kinds for problem in PROBLEMS}
    assert winners == once and done == once
    trials = searched(url)
    assert len(trials) == len(once)
    for configs in trials.values():
        assert len(configs) == TRIALS and set(configs.values()) == {1}, "no trial was lost, and none was made twice"
