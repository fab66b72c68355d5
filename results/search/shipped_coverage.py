"""How often a later comparison lies inside the interval of the shipped winner that it measured, as Markdown:

    PYTHONPATH=. python results/search/shipped_coverage.py

A cell has the number of comparisons, then the percentages inside the interval, below it and above it. `same proof` leaves out
comparisons from before the winner was last proven: they name another interval. The gathers of 2 H200 that quantise are among
these. They stood behind a product then, and are proven behind a norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotax.db.records import WinnerRecord
from results.speedups import OPERATORS, comparisons, over_bsp, winner_of

HOSTS = {"h100x2": "2 H100", "h200x2": "2 H200", "h100x4": "4 H100", "h200x4": "4 H200"}
Compared = tuple[dict[str, Any], WinnerRecord]


def compared(host: str, name: str) -> list[Compared]:
    """The comparisons that a row of the README's table counts, each with its winner."""
    return [(comparison, winner) for comparison in comparisons(host, name) if (winner := winner_of(comparison))]


def is_of_its_proof(comparison: dict[str, Any], winner: WinnerRecord) -> bool:
    """Whether a comparison names the interval that ships."""
    return f"[{winner.interval_low:.2f}, {winner.interval_high:.2f}]" in comparison["reason"]


def cell(members: Iterable[Compared]) -> str:
    """`47: 49/0/51`."""
    speedups = [(over_bsp(comparison), winner) for comparison, winner in members]
    below = sum(speedup < winner.interval_low for speedup, winner in speedups)
    above = sum(speedup > winner.interval_high for speedup, winner in speedups)
    shares = [f"{100 * count / len(speedups):.0f}" for count in (len(speedups) - below - above, below, above)]
    return f"{len(speedups)}: {'/'.join(shares)}"


def main() -> None:
    rows = {name: [compared(host, name) for host in HOSTS] for name in OPERATORS}
    rows["all"] = [[member for members in column for member in members] for column in zip(*rows.values(), strict=True)]
    for name, label in (("FP8 All-Gather + GEMM", "FP8 gathers"), ("all", "all")):
        rows[f"{label}, same proof"] = [[member for member in members if is_of_its_proof(*member)] for members in rows[name]]
    print(f"| | {' | '.join(HOSTS.values())} |\n|{'---|' * (1 + len(HOSTS))}")
    for name, columns in rows.items():
        print(f"| {name} | {' | '.join(map(cell, columns))} |")


if __name__ == "__main__":
    main()
