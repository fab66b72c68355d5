"""How far over the best alternative a kernel could be, beside how far the configs are that ship, as Markdown:

    PYTHONPATH=. python results/reach.py h100x2 h200x2

A call takes at least as long as the library's product alone, or as its bytes take on the links. `at the bound` is a call that
takes the longer of both and nothing more, or as long as ours where our own product is faster than the library's.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import geometric_mean

from autotax.operators.registry import problem_from_dict
from results.last import figures_of, kind_of
from results.speedups import comparisons

ROWS = {"bf16": ("All-Gather + GEMM", "GEMM + Reduce-Scatter"), "FP8": ("FP8 All-Gather + GEMM", "FP8 GEMM + Reduce-Scatter")}
"""Rows of the README's table, by type of the inputs."""


def ratios_of(host: str) -> dict[str, list[tuple[float, float]]]:
    """By kind of problem: over the best alternative, of what ships and of a call at the bound."""
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for dtype, names in ROWS.items():
        for comparison in (comparison for name in names for comparison in comparisons(host, name)):
            problem = problem_from_dict(comparison["problem"])
            figures = figures_of(problem, comparison["rows"])
            if figures.alone:
                least = min(figures.us, max(figures.alone, comparison["links_us"] or 0))
                kinds[f"{dtype}, {kind_of(problem)}"].append((figures.best / figures.us, figures.best / least))
    return kinds


def cells(ratios: list[tuple[float, float]]) -> str:
    """The number of problems and both geometric means."""
    if not ratios:
        return "- | - | -"
    ours, bound = (geometric_mean(column) for column in zip(*ratios, strict=True))
    return f"{len(ratios)} | {ours:.2f}x | {bound:.2f}x"


def main(hosts: list[str]) -> None:
    ratios = [ratios_of(host) for host in hosts]
    names = [f"{host[-1]} x {host[:-2].upper()}" for host in hosts]
    print(f"| | {' | '.join(f'{name} | over the best | at the bound' for name in names)} |")
    print(f"|{'---|' * (1 + 3 * len(hosts))}")
    for kind in dict.fromkeys(kind for kinds in ratios for kind in kinds):
        print(f"| {kind} | {' | '.join(cells(kinds.get(kind, [])) for kinds in ratios)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
