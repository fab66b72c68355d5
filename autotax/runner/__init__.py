"""RUNNING a config on all ranks: rank pool, watchdog, measurement. Live and replayed runs share one interface."""

from autotax.runner.live import LiveRunner
from autotax.runner.measurement import Candidate, Effort, Meanwhile, Measurement, Runner
from autotax.runner.replay import ReplayRunner

__all__ = ["Candidate", "Effort", "LiveRunner", "Meanwhile", "Measurement", "ReplayRunner", "Runner"]
