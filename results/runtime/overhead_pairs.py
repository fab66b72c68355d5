"""Compares the host times of two trees: pairs of documents that overhead.py wrote in turn, in one tree and in the other.

    python results/runtime/overhead_pairs.py before-1.json here-1.json before-2.json here-2.json ...

Machines speed up and slow down, and the addresses of a process shift its times by half a microsecond. So a row has the median of
the differences within a pair, and the least and the greatest.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def above_bare(path: str) -> dict[str, float]:
    """For each way of calling a module, median microseconds above the bare operator."""
    modules = json.loads(Path(path).read_text())["modules"]
    ways = [(module["module"], way) for module in modules for way in module["ways"] if "above" in way]
    return {f"`{module}`, {way['way']}": way["above_p50_us"] for module, way in ways}


def table(documents: list[str]) -> str:
    pairs = [(above_bare(before), above_bare(here)) for before, here in zip(documents[::2], documents[1::2], strict=True)]
    rows = ["| call | before, us | here, us | median difference | least to greatest |", "|---|---|---|---|---|"]
    for way in pairs[0][0]:
        first, second = (statistics.median(pair[tree][way] for pair in pairs) for tree in (0, 1))
        differences = [here[way] - before[way] for before, here in pairs]
        span = f"{min(differences):+.2f} to {max(differences):+.2f}"
        rows.append(f"| {way} | {first:.2f} | {second:.2f} | {statistics.median(differences):+.2f} | {span} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(sys.argv[1:]))
