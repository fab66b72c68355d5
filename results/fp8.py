"""The seeds of every variant and all alternatives of problems of a TOML file, each problem in one interleaved run, in place:

    PYTHONPATH=. python results/fp8.py results/shapes/fp8.toml [--seconds 90] [-o FILE.json]

Every result is verified in the run that measured it. Nothing is searched or stored.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from autotax import api
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import as_deployed
from autotax.hardware import detect
from autotax.operators import registry
from autotax.operators.problem_files import read_shapes
from autotax.runner.measurement import Candidate, Effort
from autotax.spaces import space_for

WORLD = 2
SEEDS = 6
"""Configs of each variant."""
EFFORT = Effort(samples=20, seconds=0.25)


def configs(problem: Problem) -> list[Config]:
    """Seeds of all variants, and alternatives."""
    here = detect()
    seeds = [seed for space in space_for(problem, here).variants.values() for seed in space.seeds[:SEEDS]]
    peers = registry.of(problem).peers.values()
    return list(dict.fromkeys([*seeds, *(Config(peer.name) for peer in peers if peer.where(problem, here))]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further problem after this time")
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    problems, here, found = read_shapes(given.shapes, WORLD), detect(), []
    ends = time.monotonic() + given.seconds
    with api.ranks(here, WORLD) as runner:
        for number, problem in enumerate(problems):
            if time.monotonic() > ends:
                print(f"{len(problems) - number} problems are left out")
                break
            for coming in problems[number + 1 : number + 3]:
                runner.expect(coming, [config for config in configs(coming) if config.params])
            tried = configs(problem)
            measured = runner.measure(problem, [Candidate(config, as_deployed(None, here)) for config in tried], EFFORT)
            rows = [(each.latency_us, each.relative_error, each.status, str(each.config)) for each in measured]
            found.append({"problem": problem.to_dict(), "rows": rows})
            print(problem.op, problem.brief())
            for us, error, status, config in sorted(rows, key=lambda row: row[0] or 1e9):
                print(f"  {us or 0:9.1f} us, error {error or 0:.2g}, {status}: {config}", flush=True)
            if given.o:
                given.o.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
