"""The same configs on torch's symmetric memory, on Iris, and on torch's again, in one process a rank and one interleaved job:

    PYTHONPATH=. python results/heaps.py [--seconds S] [-o FILE.json]

Each problem has the config that a look-up answers and the first seed of each other variant. The fastest `most` variants are
printed. The third heap is a control: its ratio to the first shows how far two slabs of one library differ. CPU ranks have shared
memory three times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import autotax
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import as_deployed
from autotax.hardware import Hardware, detect
from autotax.heap import Heap, World
from autotax.kernels.context import Context
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, FlashDecode, GemmReduceScatter
from autotax.runner.benchmark import Bench, InputCache, Trial
from autotax.runner.measurement import Candidate, Effort, Measurement
from autotax.runner.messages import Job, Report
from autotax.runner.precompile import CompileAhead
from autotax.runner.rank_worker import Session
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from autotax.tuner.finalists import median_interval, speedup

WORLD = 2
HEAP_BYTES = 2 << 30
ON_GPUS: tuple[Problem, ...] = (
    AllGatherGemm(512, 7168, 8192, world_size=WORLD),
    GemmReduceScatter(64, 8192, 2560, output="replicated", world_size=WORLD),
    FlashDecode(1, 64, 8, 128, 32768, world_size=WORLD),
    DecodeMerge(16, 64, 128, output="head_scatter", world_size=WORLD),
    AllReduceNorm(16, 8192, world_size=WORLD),
    AllGatherGemm(512, 7168, 8192, "e4m3", world_size=WORLD, scales="row"),
)
ON_CPU: tuple[Problem, ...] = (DecodeMerge(2, 4, 64, "fp32", WORLD), AllReduceNorm(5, 96, "fp32", WORLD))
sessions: dict[int, OnThreeHeaps] = {}
"""The session of this rank process, by the world size."""


class OnThreeHeaps(Session):
    """Candidates of a job take the heaps in turn."""

    def __init__(self, world: World, hardware: Hardware) -> None:
        nbytes = HEAP_BYTES if hardware.on_gpu else 64 << 20
        super().__init__(world, hardware, nbytes, lambda _: None)
        others = [_heap(world, "iris", nbytes), _heap(world, "torch", nbytes)]
        self.contexts = [self.context, *(Context(world, heap, hardware, self.context.poll_limit) for heap in others)]

    def run(self, job: Job) -> Report:
        for context in self.contexts[1:]:
            context.heap.reset()
        return super().run(job)

    def trials(self, job: Job, inputs: InputCache) -> list[Trial]:
        contexts = self.contexts * (len(job.candidates) // len(self.contexts))
        pairs = zip(job.candidates, contexts, strict=True)
        return [Trial(Bench(job.problem, candidate, context, inputs)) for candidate, context in pairs]


def _heap(world: World, library: str, nbytes: int) -> Heap:
    os.environ["AUTOTAX_HEAP"] = library
    try:
        return autotax.heap.open_heap(world, nbytes)
    finally:
        del os.environ["AUTOTAX_HEAP"]


def measure(world: World, job: Job) -> Report:
    """One job on this rank."""
    if WORLD not in sessions:
        sessions[WORLD] = OnThreeHeaps(world, detect(world.backend))
    return sessions[WORLD].run(job)


def configs_of(problem: Problem, hardware: Hardware) -> list[Config]:
    """The config that a look-up answers, and the first seed of each other variant that a search tries."""
    space, roles = space_for(problem, hardware), registry.of(problem).variants
    firsts = {name: space.default(name) for name in space.variants if roles[name].role == "search"}
    answer = autotax.lookup(problem, hardware=hardware)
    if answer.variant in firsts:
        firsts[answer.variant] = Config.of(answer.variant, answer.values)
    return list(firsts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    hardware = detect()
    problems = ON_GPUS if hardware.on_gpu else ON_CPU
    chosen = {problem: configs_of(problem, hardware) for problem in problems}
    if hardware.on_gpu:
        compilers = CompileAhead(hardware, min(32, os.cpu_count() or 1))
        for problem, configs in chosen.items():
            compilers.expect(problem, configs)
        for problem, configs in chosen.items():
            for config in configs:
                compilers.outcome(problem, config)
        compilers.close()
    print(f"{hardware}: median us in place on torch's symmetric memory and on Iris; ratios with 95 % intervals", flush=True)
    documents = list[dict[str, Any]]()
    with Ranks(WORLD, hardware.backend) as ranks:
        for number, (problem, configs) in enumerate(chosen.items()):
            documents += _measured(ranks, number, problem, configs, hardware, options.seconds, options.most)
            if options.o:
                options.o.write_text(json.dumps(documents))


def _measured(
    ranks: Ranks, number: int, problem: Problem, configs: list[Config], hardware: Hardware, seconds: float, most: int
) -> list[dict[str, Any]]:
    conditions = as_deployed(None, hardware)
    candidates = tuple(Candidate(config, conditions) for config in configs for _ in range(3))
    job = Job(number, problem, candidates, Effort(samples=60, seconds=seconds, fewest=10), number)
    try:
        reports = ranks.run(measure, job, timeout=120)
    except AssertionError as error:  # the ranks are gone, and the next problem has new ones
        print(f"{problem.op} {problem.brief()}: {str(error)[-400:]}", flush=True)
        return []
    accounts = zip(*(report.accounts for report in reports), strict=True)
    measured = [Measurement.merge(candidate, account, {}) for candidate, account in zip(candidates, accounts, strict=True)]
    rows = [(measured[at], measured[at + 1], measured[at + 2]) for at in range(0, len(measured), 3)]
    print(f"{problem.op} {problem.brief()}")
    for row in rows:
        for measurement in row:
            if measurement.status != "ok":
                print(f"  {measurement.config.variant}: {measurement.status}, {measurement.error}")
    good = [row for row in rows if all(measurement.status == "ok" for measurement in row)]
    good.sort(key=lambda row: statistics.median(row[0].rounds))
    return [_document(problem, *row) for row in good[:most]]


def _document(problem: Problem, torch: Measurement, iris: Measurement, again: Measurement) -> dict[str, Any]:
    us = {"torch": torch.rounds, "iris": iris.rounds, "torch_again": again.rounds}
    ratios = {name: speedup(us[name], us["torch"]) for name in ("iris", "torch_again")}
    medians = {name: statistics.median(rounds) for name, rounds in us.items()}
    ends = {name: median_interval(rounds) for name, rounds in us.items()}
    print(f"  {torch.config.variant:18} " + ", ".join(f"{n} {medians[n]:.2f} [{ends[n][0]:.2f}, {ends[n][1]:.2f}]" for n in us))
    for name, (middle, (low, high)) in ratios.items():
        print(f"    {name} / torch: {middle:.4f} [{low:.4f}, {high:.4f}], {len(torch.rounds)} rounds", flush=True)
    return {
        "problem": problem.key, "variant": torch.config.variant, "params": dict(torch.config.params), "samples_us": us,
        "ratio": {name: [middle, *interval] for name, (middle, interval) in ratios.items()},
        "relative_error": [one.relative_error for one in (torch, iris, again)],
    }  # fmt: skip


if __name__ == "__main__":
    main()
