"""All choices for problems, verified and measured in place in jobs that BSP is part of, the fastest first:

    PYTHONPATH=. python results/choices.py gemm-reduce-scatter m=512 n=8192 k=2560 world_size=2 --only torch --most 6

A field may have several values, as m=1,16. Choices are up to `most` seeds of each variant that applies, those of role `vendor`
included, and peers that only `compare` knows. `--vary strip=128,256` measures each seed that has the parameter with all of these
values, `--beside torch_two_shot` alternatives too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

from autotax.api import ranks
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware, detect
from autotax.operators import registry
from autotax.runner.measurement import Candidate, Effort
from autotax.spaces import space_for
from autotax.tuner.finalists import speedup

TOGETHER = 8
"""Choices of a job."""
EFFORT = Effort(samples=30, seconds=0.3, fewest=10)


def listed(field: str) -> tuple[str, list[str]]:
    """The name and the values of `name=value,value`."""
    name, values = field.split("=")
    return name, values.split(",")


def problems_of(op: str, fields: list[str]) -> Iterator[Problem]:
    """The problems that such fields describe."""
    parts = [[(name, value) for value in values] for name, values in map(listed, fields)]
    for pairs in itertools.product(*parts):
        values = {name: int(value) if value.isdigit() else value for name, value in pairs}
        yield registry.problem_from_dict({"op": op} | values)


def varied(seed: Config, parameters: list[tuple[str, list[Any]]]) -> Iterator[Config]:
    """The seed with every combination of values of those parameters that it has."""
    ways = [[(name, value) for value in values] for name, values in parameters if name in seed.values]
    for way in itertools.product(*ways):
        yield Config.of(seed.variant, seed.values | dict(way))


def choices(
    problem: Problem, hardware: Hardware, most: int, only: list[str], vary: list[tuple[str, list[Any]]]
) -> Iterator[Config]:
    """Seeds, varied, and peers that are not served."""
    space = space_for(problem, hardware)
    for name, variant in space.variants.items():
        if name != "bsp" and (name in only or not only):
            seeds = [seed for seed in dict.fromkeys(variant.seeds) if seed in space][:most]
            yield from dict.fromkeys(config for seed in seeds for config in varied(seed, vary) if config in space)
    for name, peer in registry.of(problem).peers.items():
        if not peer.served and not only and peer.where(problem, hardware):
            yield Config(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op")
    parser.add_argument("fields", nargs="+")
    parser.add_argument("--only", default="")
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--vary", nargs="+", default=[])
    parser.add_argument("--beside", nargs="+", default=[])
    given = parser.parse_args()
    hardware, problems = detect(), list(problems_of(given.op, given.fields))
    only = [name for name in given.only.split(",") if name]
    vary = [(name, [int(value) if value.isdigit() else value for value in values]) for name, values in map(listed, given.vary)]
    beside = [Config(name) for name in given.beside]
    chosen = {problem: [*choices(problem, hardware, given.most, only, vary), *beside] for problem in problems}
    with ranks(hardware, problems[0].world_size) as runner:
        for problem, configs in chosen.items():
            runner.expect(problem, [config for config in configs if config.params])
        for problem, configs in chosen.items():
            show(problem, measured(runner, problem, configs, hardware))


def measured(runner: Any, problem: Problem, configs: list[Config], hardware: Hardware) -> Iterator[tuple[Any, Any]]:
    """The baseline of its job and the row of each config."""
    conditions = Conditions.usual(hardware.on_gpu)
    baseline = Candidate(space_for(problem, hardware).default("bsp"), conditions)
    for first in range(0, len(configs), TOGETHER):
        job = [baseline, *(Candidate(config, conditions) for config in configs[first : first + TOGETHER])]
        bsp, *others = runner.measure(problem, job, EFFORT)
        yield from ((bsp, other) for other in others)


def show(problem: Problem, pairs: Iterator[tuple[Any, Any]]) -> None:
    print(f"{problem.op} {problem.brief()}")
    for bsp, row in sorted(pairs, key=lambda pair: pair[1].latency_us or float("inf")):
        both = bsp.samples and row.samples and row.verified
        times = f"{speedup(bsp.rounds, row.rounds)[0]:.2f}x BSP of {bsp.latency_us:.1f}" if both else (row.error or "")[:200]
        print(f"  {row.latency_us or 0:8.2f} us  {row.status:12} {times}  {row.config}", flush=True)


if __name__ == "__main__":
    main()
