"""Runs a config on all ranks; live and replayed runs share one interface. Every rank imports this package at its start."""

from autotax.runner.local_runner import LiveRunner
from autotax.runner.measurement import Candidate, Effort, Measurement, Overlap, Runner

__all__ = ["Candidate", "Effort", "LiveRunner", "Measurement", "Overlap", "Runner"]
