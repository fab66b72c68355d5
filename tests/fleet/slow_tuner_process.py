"""`python -m tests.fleet.slow_tuner_process FD`: no ranks, a made-up landscape, slow trials. Slots are of two kinds."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.fleet.tuner_process import serve
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.runner.processes import die_with_parent
from autotax.software import Environment, environment
from tests.fleet.tuner_process import two_kinds
from tests.tuner.synthetic import SyntheticRunner

TRIAL_S = 0.15


class SlowRunner(SyntheticRunner):
    @property
    def environment(self) -> Environment:
        return environment("cpu")

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        time.sleep(TRIAL_S)
        return super().measure(problem, candidates, effort, overlap)


def landscape(config: Config) -> float:
    """BSP is slow; all others differ, and none fails."""
    return 130.0 if config.variant == "bsp" else 100.0 + int(config.digest, 16) % 29


def runners(*_: object) -> SlowRunner:
    return SlowRunner(landscape)


if __name__ == "__main__":
    die_with_parent("autotax-bench")
    serve(Connection(int(sys.argv[1])), runners, two_kinds)
