"""`autotax tune --dry-run`: what would be tuned, what answers today, and how long it may take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotax.cli.options import MachineOptions
from autotax.cli.problem_selection import expected_on_cpu
from autotax.core.problem import Problem

if TYPE_CHECKING:
    from autotax.cli.problem_selection import Job
    from autotax.db.lookup import Answer
    from autotax.hardware import Hardware

GPU_TRIALS_A_SECOND = 4.0
"""What 4 x H200 measured with a cold Triton cache: results/h200x4/runner."""
HERE, ELSEWHERE, CPU = "the runs recorded on this machine", "4 trials a second, as 4 x H200 measured", "a laptop's CPU ranks"


@dataclass(frozen=True)
class Planned:
    """A problem that would be tuned: who asks for it, what a look-up answers today, and about how long it takes."""

    problem: Problem
    layers: str
    trials: int
    answer: Answer
    expected_s: float
    basis: str


def plan(jobs: Sequence[Job], layers: Mapping[Problem, str], hardware: Hardware, where: MachineOptions) -> list[Planned]:
    """The jobs in their order. Measures nothing, and creates no database."""
    from autotax.db.lookup import peek

    recorded = _recorded(where, hardware)
    planned = []
    for problem, settings in jobs:
        seconds, basis = _expected(problem, settings.trials, hardware, recorded)
        if settings.timeout_s is not None:
            seconds = min(seconds, settings.timeout_s)
        answer = peek(problem, hardware=hardware, db=where.db, conditions=settings.conditions)
        planned.append(Planned(problem, layers.get(problem, ""), settings.trials, answer, seconds, basis))
    return planned


def document(each: Planned) -> dict[str, Any]:
    """A planned problem as `--json` tells it."""
    return {
        "problem": each.problem.to_dict(),
        "layers": each.layers,
        "trials": each.trials,
        "match": each.answer.match,
        "variant": each.answer.variant,
        "expected_s": round(each.expected_s, 1),
        "basis": each.basis,
    }


def _expected(problem: Problem, trials: int, hardware: Hardware, recorded: Mapping[str, float]) -> tuple[float, str]:
    """Seconds for a problem, and where that comes from."""
    if not hardware.on_gpu:
        return expected_on_cpu(problem, trials), CPU
    if problem.op in recorded:  # whatever its sizes: on GPUs a trial is mostly compiling and host work
        return trials * recorded[problem.op], HERE
    return trials / GPU_TRIALS_A_SECOND, ELSEWHERE


def _recorded(where: MachineOptions, hardware: Hardware) -> dict[str, float]:
    """Seconds for a trial, by operator: the median over the runs on this hardware that ended."""
    with where.store(create=False) as store:
        trials = store.trials(hardware=hardware)
    runs = {trial.run.id: trial.run for trial in trials if trial.run is not None and trial.run.ended_at is not None}
    counts: dict[int, int] = {}
    for trial in trials:
        if trial.run is not None:
            counts[trial.run.id] = counts.get(trial.run.id, 0) + 1
    rates: dict[str, list[float]] = {}
    for number, run in runs.items():
        assert run.ended_at is not None
        rates.setdefault(run.problem.op, []).append((run.ended_at - run.started_at).total_seconds() / counts[number])
    return {op: statistics.median(found) for op, found in rates.items()}
