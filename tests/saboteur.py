"""A runner that harms itself now and then, under the real command line: `python -m tests.saboteur PLAN tune ...`.

It injects a fault every few measurements. It may first measure a harmful candidate, which appears only in its log. Or it kills or
stops a rank during a measurement, which costs an innocent config its trial.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autotax.cli import app
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators.problems import AllGatherGemm
from autotax.runner import Candidate, Effort, LiveRunner, Measurement, Overlap

HARMFUL = {
    "kernel_hang": "hang",
    "exits": "crash",
    "killed": "crash",
    "stopped": "hang",
    "raises": "crash",
    "no_memory": "out_of_resources",
    "wrong_element": "wrong_result",
    "skips_tile": "wrong_result",
}
"""Variants of tests.runner.faults, and the status with which each must end."""
ON_GPUS = {"illegal_access": "crash"}
STRIKES = {"rank killed": signal.SIGKILL, "rank stopped": signal.SIGSTOP}


@dataclass(frozen=True)
class Plan:
    log: str
    """File to which each fault and each start of the ranks is appended, a JSON object a line."""
    every: int
    """Measurements between two faults."""
    deadline_s: float
    seed: int


class Saboteur(LiveRunner):
    plan: Plan

    def __init__(self, hardware: Hardware, world_size: int, **more: Any) -> None:
        super().__init__(hardware, world_size, deadline_s=self.plan.deadline_s, modules=("tests.runner.faults",), **more)
        self.vehicle = AllGatherGemm(256, 256, 256, "bf16" if hardware.on_gpu else "fp32", "m", world_size)
        if not hardware.on_gpu:
            self.vehicle = AllGatherGemm(48, 40, 32, "fp32", "m", world_size)
        self.harmful = HARMFUL | (ON_GPUS if hardware.on_gpu else {})
        self.random = random.Random(self.plan.seed)
        self.bag: list[str] = []
        self.calls = 0
        self.usual_s = 0.1
        self.inside = False
        self.lock = threading.Lock()
        self.struck = False

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        if self.inside:  # the runner looks for the culprit
            return super().measure(problem, candidates, effort)
        self.calls += 1
        fault = self.next_fault() if self.calls % self.plan.every == 0 else None
        if fault in STRIKES:
            return self.measure_struck(fault, problem, candidates, effort)
        if fault:
            self.measure_harmful(fault)
        started = time.monotonic()
        measurements = self.within(problem, candidates, effort, overlap)
        self.usual_s = time.monotonic() - started
        return measurements

    def next_fault(self) -> str:
        """Draws each kind of fault once in random order, then starts again."""
        if not self.bag:
            self.bag = [*self.harmful, *STRIKES]
            self.random.shuffle(self.bag)
        return self.bag.pop()

    def within(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        self.inside = True
        try:
            return super().measure(problem, candidates, effort, overlap)
        finally:
            self.inside = False

    def measure_harmful(self, fault: str) -> None:
        started = time.monotonic()
        candidate = Candidate(Config(fault), Conditions.usual(self.hardware.on_gpu))
        (measurement,) = self.within(self.vehicle, [candidate], Effort(samples=4, seconds=0.05))
        self._ensure_running()
        self.log(fault=fault, seconds=time.monotonic() - started, status=measurement.status, expected=self.harmful[fault])

    def measure_struck(
        self, fault: str, problem: Problem, candidates: Sequence[Candidate], effort: Effort
    ) -> list[Measurement]:
        self._ensure_running()
        started = time.monotonic()
        timer = threading.Timer(self.random.uniform(0.0, 0.8 * self.usual_s), self.strike, [STRIKES[fault]])
        timer.start()
        measurements = self.within(problem, candidates, effort)
        with self.lock:
            timer.cancel()
            struck, self.struck = self.struck, False
        victims = [m.config.digest for m in measurements if not m.verified] if struck else []
        if struck and not victims:
            self.pool.kill()  # it came too late, or the job outlived it: the next must not meet a rank that is stopped
        self._ensure_running()
        if struck:
            seconds, jobs = max(0.0, time.monotonic() - started - self.usual_s), len(candidates)
            self.log(fault=fault, seconds=seconds, candidates=jobs, problem=problem.key, victims=victims)
        return measurements

    def strike(self, how: signal.Signals) -> None:
        with self.lock, suppress(ProcessLookupError, IndexError):
            if self.inside:
                os.kill(self.random.choice(self.pool.ranks).child.process.pid, how)
                self.struck = True

    def _ensure_running(self, until: float = math.inf, overlap: Callable[[], None] | None = None) -> None:
        if not self.pool.running:
            self.log(start=True)
        super()._ensure_running(until, overlap)

    def log(self, **what: Any) -> None:
        with Path(self.plan.log).open("a") as log:
            log.write(json.dumps(what) + "\n")


def main() -> int:
    Saboteur.plan = Plan(**json.loads(sys.argv[1]))
    with mock.patch("autotax.runner.LiveRunner", Saboteur):
        return app.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
