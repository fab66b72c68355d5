"""One config against every other way of doing the same, in one interleaved and verified run."""

from __future__ import annotations

from dataclasses import dataclass

from autotax.conditions import EAGER, ON_CPU
from autotax.config import Config
from autotax.hardware import Hardware
from autotax.problem import AllGatherGemm, Problem
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner
from autotax.tuner.statistics import speedup

EFFORT = Effort(samples=60, seconds=1.0)


@dataclass(frozen=True)
class Row:
    """`speedup` is over BSP as a graph (on CPU ranks: over BSP), from paired samples; None where either is not verified."""

    name: str
    variant: str
    measurement: Measurement
    speedup: float | None


def compare(
    problem: Problem, *, hardware: Hardware, runner: Runner, config: Config, baseline: Config
) -> list[Row]:
    """Measures `config`, BSP and, for All-Gather + GEMM on NVIDIA, torch's fused operator and the bare product.

    A row that fails carries its status and does not end the others.
    """
    named = _candidates(problem, hardware, config, baseline)
    measured = runner.measure(problem, list(named.values()), EFFORT)
    reference = dict(zip(named, measured, strict=True))["bsp-graph" if hardware.on_gpu else "bsp-eager"]
    return [
        Row(name, measurement.config.variant, measurement, _speedup(reference, measurement))
        for name, measurement in zip(named, measured, strict=True)
    ]


def _candidates(problem: Problem, hardware: Hardware, config: Config, baseline: Config) -> dict[str, Candidate]:
    if not hardware.on_gpu:
        return {"autotax": Candidate(config, ON_CPU), "bsp-eager": Candidate(baseline, ON_CPU)}
    named = {
        "autotax": Candidate(config),
        "bsp-graph": Candidate(baseline),
        "bsp-eager": Candidate(baseline, EAGER),
    }
    if isinstance(problem, AllGatherGemm):
        if hardware.backend == "cuda" and problem.shard == "m":
            named |= {"torch-graph": Candidate(Config("torch")), "torch-eager": Candidate(Config("torch"), EAGER)}
        named["cublas"] = Candidate(Config("product"))
    return named


def _speedup(reference: Measurement, measurement: Measurement) -> float | None:
    if not (reference.verified and measurement.verified and reference.samples and measurement.samples):
        return None
    return speedup(reference.rounds, measurement.rounds)[0]
