"""Stages: pieces of work of the ranks between two agreements. A candidate goes on only if a stage went well on all ranks, so that
no rank waits in a kernel for a peer that has given up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autotax.core.errors import LONGEST, described
from autotax.core.settings import TRIAL_STATUSES
from autotax.heap import HeapError, World
from autotax.runner.benchmark import Bench, KernelTimeout, WrongResult
from autotax.runner.measurement import Raised, RankReport, Stage
from autotax.runner.processes import full_disk

LOCAL = ("inputs", "compile")
"""Stages in which no rank waits for another."""


class Fault(Exception):
    """A device error after which this process cannot go on."""


@dataclass(frozen=True)
class Outcome:
    """How a stage went: the gravest status of all ranks, the cause if this rank met it, its seconds, and each rank's figure."""

    status: str
    error: str | None
    seconds: float
    values: tuple[float, ...]


class Stages:
    """Carries out stages in step with the peers; `tell` receives each stage before it begins, because the rank may hang in it,
    and each error raised.
    """

    def __init__(self, world: World, tell: Callable[[Stage | Raised], None]) -> None:
        self.world = world
        self._tell = tell

    def tell(self, stage: str) -> None:
        """Reports the current stage of this rank."""
        self._tell(Stage(stage))

    def run(self, stage: str, action: Callable[[], Any], label: str | None = None) -> Outcome:
        """Does one stage and agrees with the peers on how it went. Collective. Raises Fault, and again any error about a full
        disk.
        """
        self.tell(label or stage)
        status, error, figure = "ok", None, None
        started = time.perf_counter()
        try:
            figure = action()
        except Exception as problem:
            if full_disk(problem):
                raise
            status = _classify(problem, stage)
            of_code = status in ("crash", "compile_error")
            error = f"{stage}: " + (described(problem) if of_code else f"{type(problem).__name__}: {str(problem)[-LONGEST:]}")
            if status in ("crash", "out_of_resources") and stage not in LOCAL:  # after other errors no peer waits
                self._tell(Raised(status, error))
            if status == "crash" and self.world.device.type == "cuda" and not _device_answers():
                raise Fault(error) from problem
        seconds = time.perf_counter() - started
        value = figure if isinstance(figure, float) else math.nan
        statuses, values = zip(*self.world.gather((status, value), tuple[str, float]), strict=True)
        gravest = max(statuses, key=TRIAL_STATUSES.index)
        if gravest == "out_of_resources":
            free_device_memory(self.world)
        # Reports errors of the ranks with the worst status only; the others merely timed out.
        return Outcome(gravest, error if status == gravest else None, seconds, values)


def free_device_memory(world: World) -> None:
    """Gives unused memory from torch back to the device, because collectives, graphs and libraries allocate there."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _classify(error: Exception, stage: str) -> str:
    """The status for an exception of a stage."""
    if isinstance(error, WrongResult):
        return "wrong_result"
    if isinstance(error, KernelTimeout):
        return "hang"
    if isinstance(error, HeapError | torch.OutOfMemoryError) or type(error).__name__ == "OutOfResources":
        return "out_of_resources"
    return "compile_error" if stage == "compile" else "crash"


def _device_answers() -> bool:
    """Whether the device can still be used. After an illegal access it cannot be used in this process."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


# One candidate on one rank, from its first stage to its report.

class Trial:
    """`status` and the further figures in `beside` are equal on all ranks. `error`, `samples` and seconds are those of this rank.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.status = "ok"
        self.error: str | None = None
        self.estimate_us = 0.0
        self.samples: list[float] = []
        self.given_up = False
        self.remeasured = 0
        self.soaked = 0
        self.beside: dict[str, float] = {}
        self.device_s = 0.0

    @property
    def alive(self) -> bool:
        return self.status == "ok"

    def take(self, outcome: Outcome, on_device: bool = True) -> None:
        """Adds the outcome of a stage to this trial; `on_device` says whether the stage works on the device."""
        self.status, self.error = outcome.status, outcome.error
        if on_device:
            self.device_s += outcome.seconds

    def report(self) -> RankReport:
        return RankReport(
            status="pruned" if self.alive and self.given_up else self.status,
            error=self.error,
            samples=tuple(self.samples) if self.alive else (),
            compile_s=self.bench.compile_s,
            relative_error=self.bench.relative_error if self.status in ("ok", "wrong_result") else None,
            device_s=self.device_s,
            remeasured=self.remeasured,
            soaked=self.soaked,
            beside=self.beside,
        )
