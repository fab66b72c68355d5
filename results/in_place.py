"""What winners take in place and back to back, with BSP beside them, on the GPUs here:

    PYTHONPATH=. python results/in_place.py [--db DATABASE] [-o FILE.json]

Configs are those that a look-up answers. A figure in place is what calls add to a graph of products.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import autotax
from autotax.operators.problems import AllGatherGemm, DecodeMerge, GemmReduceScatter
from autotax.report import documents
from autotax.report.formatting import microseconds

WORLD = 2
PROBLEMS = (
    DecodeMerge(1, 128, 512, output="head_scatter", world_size=WORLD),
    DecodeMerge(16, 64, 128, output="head_scatter", world_size=WORLD),
    AllGatherGemm(512, 7168, 8192, world_size=WORLD),
    GemmReduceScatter(64, 8192, 2560, output="replicated", world_size=WORLD),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db")
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    comparisons = []
    for problem in PROBLEMS:
        compared = autotax.compare(problem, db=given.db)
        comparisons.append(documents.of_comparison(compared))
        print(f"{problem.op} {problem.brief()}", flush=True)
        for row in comparisons[-1]["rows"]:
            ends = " to ".join(map(microseconds, row["interval_us"] or []))
            alone = microseconds(row["back_to_back_us"])
            print(f"  {row['name']:24} {microseconds(row['latency_us']):>8} us ({ends}), back to back {alone}, {row['status']}")
    if given.o:
        given.o.write_text(json.dumps(comparisons))


if __name__ == "__main__":
    main()
