"""How often what others wrote was the fastest of a search, in all recorded searches of this folder's hosts:

    PYTHONPATH=. python results/search/alternatives.py > results/search/alternatives.txt

Counts searches that verified an alternative beside three more variants at least. `ratio` is its least time over the least of all.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from autotax.operators import operators

HOSTS = Path(__file__).parents[1]


def main() -> None:
    peers = {name for operator in operators().values() for name in operator.peers}
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for path in sorted(HOSTS.glob("*/landscapes.json.gz")):
        with gzip.open(path) as file:
            landscapes = json.load(file)
        least: dict[int, dict[str, float]] = defaultdict(dict)
        for trial in landscapes["results"]:
            us = trial["measurements"][0]["value"] if trial["measurements"] else None
            if trial["invalidity"] == "correct" and us and not trial.get("final"):
                of_run, variant = least[trial["run"]], trial["configuration"]["variant"]
                of_run[variant] = min(us, of_run.get(variant, us))
        for run, of_run in least.items():
            for variant in peers & of_run.keys() if len(of_run) > 3 else ():
                op = landscapes["runs"][run]["problem"].partition("/")[0]
                ratios[op, variant].append(of_run[variant] / min(of_run.values()))
    print(f"{'operator':20s} {'alternative':28s} searches  fastest  within 2 %  median ratio  least")
    for (op, variant), of_searches in sorted(ratios.items()):
        won, near = sum(ratio == 1 for ratio in of_searches), sum(ratio < 1.02 for ratio in of_searches)
        figures = f"{len(of_searches):8d} {won:8d} {near:11d} {median(of_searches):13.2f} {min(of_searches):6.2f}"
        print(f"{op:20s} {variant:28s} {figures}")


if __name__ == "__main__":
    main()
