"""All choices for one problem, verified and measured in place in jobs that BSP is part of, the fastest first:

    PYTHONPATH=. python results/choices.py gemm-reduce-scatter m=512 n=8192 k=2560 world_size=2 --only torch --most 6

Choices are up to `most` seeds of each variant that applies, those of role `vendor` included, and peers that only `compare` knows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from autotax.api import ranks
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware, detect
from autotax.operators import registry
from autotax.runner.measurement import Candidate, Effort
from autotax.spaces import space_for
from autotax.tuner.statistics import speedup

TOGETHER = 8
"""Choices of a job."""
EFFORT = Effort(samples=30, seconds=0.3, fewest=10)


def problem_of(op: str, fields: list[str]) -> Problem:
    """The problem that `name=value` fields describe."""
    told = dict(field.split("=") for field in fields)
    values = {name: int(value) if value.isdigit() else value for name, value in told.items()}
    return registry.problem_from_dict({"op": op} | values)


def choices(problem: Problem, hardware: Hardware, most: int, only: list[str]) -> Iterator[Config]:
    """Seeds, and peers that are not served."""
    space = space_for(problem, hardware)
    for name, variant in space.variants.items():
        if name != "bsp" and (name in only or not only):
            yield from (seed for seed in list(dict.fromkeys(variant.seeds))[:most] if seed in space)
    for name, peer in registry.of(problem).peers.items():
        if not peer.served and not only and peer.where(problem, hardware):
            yield Config(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op")
    parser.add_argument("fields", nargs="+")
    parser.add_argument("--only", default="")
    parser.add_argument("--most", type=int, default=6)
    given = parser.parse_args()
    problem, hardware = problem_of(given.op, given.fields), detect()
    conditions = Conditions.usual(hardware.on_gpu)
    chosen = list(choices(problem, hardware, given.most, [name for name in given.only.split(",") if name]))
    baseline, found = Candidate(space_for(problem, hardware).default("bsp"), conditions), []
    with ranks(hardware, problem.world_size) as runner:
        runner.expect(problem, chosen)
        for first in range(0, len(chosen), TOGETHER):
            job = [baseline, *(Candidate(config, conditions) for config in chosen[first : first + TOGETHER])]
            bsp, *others = runner.measure(problem, job, EFFORT)
            found += [(bsp, other) for other in others]
    print(f"{problem.op} {problem.brief()}")
    for bsp, row in sorted(found, key=lambda pair: pair[1].latency_us or float("inf")):
        both = bsp.samples and row.samples and row.verified
        times = f"{speedup(bsp.rounds, row.rounds)[0]:.2f}x BSP of {bsp.latency_us:.1f}" if both else (row.error or "")[:200]
        print(f"  {row.latency_us or 0:8.2f} us  {row.status:12} {times}  {row.config}", flush=True)


if __name__ == "__main__":
    main()
