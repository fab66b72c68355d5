"""The fate of one candidate on one rank, from its first stage to its report."""

from __future__ import annotations

from autotax.runner.benchmark import Bench
from autotax.runner.measurement import RankReport
from autotax.runner.stages import Outcome


class Trial:
    """`status` and what stands `beside` the figure are the same on all ranks; `error`, `samples` and seconds are a rank's own."""

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
        """Makes the outcome of a stage this trial's; `on_device` says whether the stage works on the device."""
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
