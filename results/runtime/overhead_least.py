"""The least host time of each way of overhead.py, for machines that other programs load: on one CPU, without ranks.

    python results/runtime/overhead_least.py > here.json
    python results/runtime/overhead_least.py before.json here.json     # the table of two trees, the least of each

A way is timed 400 times for a few milliseconds, in turn with the others. Its least time hardly depends on other programs. A
file may hold several lines, one a run.
"""

from __future__ import annotations

import json
import sys
import timeit
from pathlib import Path

import torch
from overhead import ways_of_decode, ways_of_linear

RUNS = 400
CALLS = {"AllGatherLinear": 150, "FlashDecode": 40}


def least_us() -> dict[str, float]:
    """Microseconds of each way."""
    torch.set_num_threads(1)
    least: dict[str, float] = {}
    with torch.no_grad():
        for name, prepare in (("AllGatherLinear", ways_of_linear), ("FlashDecode", ways_of_decode)):
            _, ways = prepare(1, torch.device("cpu"), None)
            for _ in range(RUNS):
                for way, call in ways.items():
                    us = timeit.timeit(call, number=CALLS[name]) / CALLS[name] * 1e6
                    least[f"{name}, {way}"] = min(us, least.get(f"{name}, {way}", us))
    return least


def table(before: Path, here: Path) -> str:
    runs = [[json.loads(line) for line in path.read_text().splitlines()] for path in (before, here)]
    rows = ["| call | before, us | here, us | difference |", "|---|---|---|---|"]
    for way in runs[0][0]:
        first, second = (min(run[way] for run in tree) for tree in runs)
        rows.append(f"| {way} | {first:.2f} | {second:.2f} | {second - first:+.2f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(*map(Path, sys.argv[1:])) if sys.argv[1:] else json.dumps(least_us()))
