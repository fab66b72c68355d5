"""Compares the last comparisons of a file with the comparisons of the same problems before, row by row:

    PYTHONPATH=. python results/repeats.py results/h200x2/fp8/comparisons.jsonl.xz --last 55

`ratio` is the time of a row in the later comparison over that in the one before it.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any


def times(comparison: dict[str, Any]) -> dict[str, float]:
    """Microseconds of what ran in a graph and is no config of ours, by row."""
    return {row["name"]: row["latency_us"] for row in comparison["rows"] if row["latency_us"] and row["name"].endswith("-graph")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--last", type=int, required=True, help="how many comparisons at the end of the file are the later ones")
    options = parser.parse_args()
    comparisons = [json.loads(line) for line in lzma.decompress(options.file.read_bytes()).decode().splitlines()]
    before = {comparison["key"]: times(comparison) for comparison in comparisons[: -options.last]}
    ratios: dict[str, list[float]] = defaultdict(list)
    for comparison in comparisons[-options.last :]:
        former = before.get(comparison["key"], {})
        for row, us in times(comparison).items():
            if row in former:
                ratios[row].append(us / former[row])
    print(f"{'row':40s} problems  median ratio  least  greatest")
    for row, of_problems in sorted(ratios.items()):
        print(f"{row:40s} {len(of_problems):8d} {median(of_problems):13.3f} {min(of_problems):6.3f} {max(of_problems):9.3f}")


if __name__ == "__main__":
    main()
