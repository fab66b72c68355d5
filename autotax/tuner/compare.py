"""One config against every other way of doing the same, in one interleaved and verified run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.hardware import Hardware
from autotax.problem import AllGatherGemm, Problem
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner
from autotax.tuner.settings import as_deployed
from autotax.tuner.statistics import speedup

EFFORT = Effort(samples=60, seconds=1.0)


@dataclass(frozen=True)
class Row:
    """`speedup` is over BSP of the mode compared (graph, or eager as on CPU ranks), from paired samples; None where either is not
    verified."""

    name: str
    variant: str
    measurement: Measurement
    speedup: float | None


def compare(
    problem: Problem,
    *,
    hardware: Hardware,
    runner: Runner,
    config: Config,
    baseline: Config,
    conditions: Conditions | None = None,
) -> list[Row]:
    """Measures `config`, BSP and, for All-Gather + GEMM on NVIDIA, torch's fused operator and the bare product, under
    `conditions` (None: usual ones); rows that say `graph` or `eager` are so whatever the conditions are.

    A row that fails carries its status and does not end the others. Raises UsageError for conditions that the machine
    does not know.
    """
    conditions = as_deployed(conditions, hardware)
    named = _candidates(problem, hardware, config, baseline, conditions)
    measured = runner.measure(problem, list(named.values()), EFFORT)
    reference = dict(zip(named, measured, strict=True))[f"bsp-{conditions.mode}"]
    return [
        Row(name, measurement.config.variant, measurement, _speedup(reference, measurement))
        for name, measurement in zip(named, measured, strict=True)
    ]


def _candidates(
    problem: Problem, hardware: Hardware, config: Config, baseline: Config, conditions: Conditions
) -> dict[str, Candidate]:
    eager = replace(conditions, mode="eager")
    if not hardware.on_gpu:
        return {"autotax": Candidate(config, conditions), "bsp-eager": Candidate(baseline, eager)}
    graph = replace(conditions, mode="graph")
    named = {
        "autotax": Candidate(config, conditions),
        "bsp-graph": Candidate(baseline, graph),
        "bsp-eager": Candidate(baseline, eager),
    }
    if isinstance(problem, AllGatherGemm):
        if hardware.backend == "cuda" and problem.shard == "m":
            torch = Config("torch")
            named |= {"torch-graph": Candidate(torch, graph), "torch-eager": Candidate(torch, eager)}
        named["cublas"] = Candidate(Config("product"), conditions)
    return named


def _speedup(reference: Measurement, measurement: Measurement) -> float | None:
    if not (reference.verified and measurement.verified and reference.samples and measurement.samples):
        return None
    return speedup(reference.rounds, measurement.rounds)[0]
