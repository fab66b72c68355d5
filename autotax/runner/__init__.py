"""Runs a config on all ranks; live and replayed runs share one interface. Every rank imports this package at its start."""

from autotax.runner.local_runner import LiveRunner
from autotax.runner.measurement import Candidate, Effort, Meanwhile, Measurement, Runner

__all__ = ["Candidate", "Effort", "LiveRunner", "Meanwhile", "Measurement", "Runner"]
