"""Seeds of every variant and all alternatives of problems of a TOML file, each problem in one interleaved run, in place:

    PYTHONPATH=. python results/fp8.py SHAPES.toml [--seeds 6] [--seconds 90] [--replays 10000 --finalists 6] [-o FILE.json]

Every result is verified in the run that measured it. Nothing is searched or stored. Then graphs of the fastest configs of the
first problems are replayed with changing inputs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import groupby, zip_longest
from pathlib import Path

from autotax import api
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import as_deployed
from autotax.hardware import Hardware, detect
from autotax.operators import registry
from autotax.operators.problem_files import read_shapes
from autotax.runner.measurement import Candidate, Effort
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls

WORLD = 2
EFFORT = Effort(samples=20, seconds=0.25)
FAST = ("torch_fast", "nccl_fast")
"""Alternatives that accumulate with fewer bits."""


def configs(problem: Problem, here: Hardware, seeds: int) -> list[Config]:
    """Seeds of all variants, and alternatives."""
    tried = [seed for space in space_for(problem, here).variants.values() for seed in space.seeds[:seeds]]
    peers = registry.of(problem).peers.values()
    return list(dict.fromkeys([*tried, *(Config(peer.name) for peer in peers if peer.where(problem, here))]))


def best(rows: list[tuple[float, str]]) -> tuple[float, str]:
    """The fastest row: microseconds and variant."""
    us, config = min(rows, default=(math.nan, "-"))
    return us, config.split("(")[0]


def line(problem: Problem, rows: list[tuple[float, str]]) -> str:
    """A row of the table: this project's best, the best exact and the best fast alternative, the product alone."""
    groups: dict[str, list[tuple[float, str]]] = {"ours": [], "exact": [], "fast": [], "product": []}
    for us, config in rows:
        name = config.split("(")[0]
        kind = "ours" if name.startswith("scaled_") else "fast" if name in FAST else name if name == "product" else "exact"
        groups[kind].append((us, config))
    cells = [f"{us:.1f} (`{name}`)" for us, name in map(best, groups.values())]
    others = best([*groups["exact"], *groups["fast"]])[0]
    return f"| {problem.op} {problem.brief()} | {' | '.join(cells)} | {others / best(groups['ours'])[0]:.2f} |"


def in_turn(problems: list[Problem]) -> list[Problem]:
    """Problems of the operators in turn, so that a lack of time leaves out some of each."""
    by_operator = [list(group) for _, group in groupby(problems, key=lambda problem: problem.op)]
    return [problem for some in zip_longest(*by_operator) for problem in some if problem]


def replay(finalists: list[tuple[Problem, Config]], here: Hardware, replays: int) -> None:
    """Prints the worst error of each finalist, and how many elements ever changed in its replays."""
    with Ranks(WORLD, here.backend) as ranks:
        for problem, config in finalists:
            reports = ranks.run(calls.replay, problem, config, replays, timeout=60)
            worst, wrong = max(error for error, _ in reports), sum(count for _, count in reports)
            said = f"{replays} replays, {wrong} elements wrong, error {worst:.2g}"
            print(f"{said}: {problem.op} {problem.brief()} {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--seeds", type=int, default=6, help="configs of each variant")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further problem after this time")
    parser.add_argument("--replays", type=int, default=0, help="replays of the fastest configs of this project")
    parser.add_argument("--finalists", type=int, default=6, help="problems whose fastest configs are replayed")
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    problems, here, entries, table = in_turn(read_shapes(given.shapes, WORLD)), detect(), [], []
    finalists: list[tuple[Problem, Config]] = []
    ends = time.monotonic() + given.seconds
    print(here.device)
    with api.ranks(here, WORLD) as runner:
        for number, problem in enumerate(problems):
            if time.monotonic() > ends:
                print(f"{len(problems) - number} problems are left out")
                break
            for coming in problems[number + 1 : number + 3]:
                runner.expect(coming, [config for config in configs(coming, here, given.seeds) if config.params])
            tried = configs(problem, here, given.seeds)
            measured = runner.measure(problem, [Candidate(config, as_deployed(None, here)) for config in tried], EFFORT)
            rows = [(trial.latency_us, trial.relative_error, trial.status, str(trial.config)) for trial in measured]
            entries.append({"problem": problem.to_dict(), "rows": rows})
            print(problem.op, problem.brief())
            for us, error, status, config in sorted(rows, key=lambda row: row[0] or 1e9):
                print(f"  {us or 0:9.1f} us, error {error or 0:.2g}, {status}: {config}", flush=True)
            for error in dict.fromkeys(trial.error for trial in measured if trial.error):
                print(f"  {error}", flush=True)
            ours = [trial for trial in measured if trial.status == "ok" and str(trial.config).startswith("scaled_")]
            if ours:
                finalists.append((problem, min(ours, key=lambda trial: trial.latency_us or math.inf).config))
            table.append(line(problem, [(us, config) for us, _, status, config in rows if us and status == "ok"]))
            if given.o:
                given.o.write_text(json.dumps(entries))
    print("| problem | ours | exact | fast | product | over the best |\n|---|---|---|---|---|---|", *table, sep="\n", flush=True)
    if given.replays:
        replay(finalists[: given.finalists], here, given.replays)


if __name__ == "__main__":
    main()
