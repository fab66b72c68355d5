"""Helpers of the tests of live runners on CPU ranks: a problem that takes a millisecond, and the effort to measure it."""

from __future__ import annotations

from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.runner import Candidate, Effort, LiveRunner, Measurement

CPU = detect("cpu")
GEMM = AllGatherGemm(48, 40, 32, "fp32", "m", 2)
QUICK = Effort(samples=4, seconds=0.05)
FAULTS = ("tests.runner.faults",)


def measure(
    runner: LiveRunner, *variants: str, effort: Effort = QUICK, conditions: Conditions = ON_CPU, problem: AllGatherGemm = GEMM
) -> list[Measurement]:
    return runner.measure(problem, [Candidate(Config(variant), conditions) for variant in variants], effort)
