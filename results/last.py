"""Prints Markdown of the last comparison of each winner of a folder, and geometric means by kind:

    PYTHONPATH=. python results/last.py results/h200x2/fp8

`exact` is the fastest alternative in a graph that accumulates in float32, `fast` the fastest with fast accumulation, `alone` the
library's product, where the library has one. Where a problem permits fast accumulation, `exact` is the fastest of both kinds.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import formats
from autotax.operators.scaled import GROUP
from autotax.report.formatting import microseconds

NAMES = {"torch_reduce_scatter": "torch_rs"}
EXCESS, START_US = 1.10, 6.0
"""A figure is near the product if it is at most so many times its time and so many microseconds more."""


class Figures(NamedTuple):
    variant: str
    us: float
    bsp: float
    exact: float
    exact_name: str
    fast: float | None
    alone: float | None

    @property
    def best(self) -> float:
        return min(self.exact, self.fast or self.exact)


def figures_of(problem: Problem, rows: list[dict[str, Any]]) -> Figures:
    """The figures of one comparison."""
    permitted = vars(problem).get("accumulate") == "fast"
    measured = {row["name"]: row for row in rows if row["latency_us"] and row["verified"] is not False}
    ours = measured.pop("autotax")
    products = [row["latency_us"] for name, row in measured.items() if name.startswith("cublas") and library_multiplies(problem)]
    others = {name: row["latency_us"] for name, row in measured.items() if name.endswith("-graph")}
    exact = min((us, name) for name, us in others.items() if permitted or "fast" not in name)
    fast = min((us for name, us in others.items() if "fast" in name and not permitted), default=None)
    us, bsp, alone = ours["latency_us"], others["bsp-graph"], min(products, default=None)
    return Figures(short(ours["variant"]), us, bsp, exact[0], short(exact[1]), fast, alone)


def library_multiplies(problem: Problem) -> bool:
    """Whether the library has the product. The row `cublas` of others, with blocks, multiplies dequantised numbers in float32."""
    values = vars(problem)
    return values["scales"] != "block" or (values["k"] % (4 * GROUP) == 0 and values["m"] % 4 == 0)


def is_of(config: Config, rows: list[dict[str, Any]]) -> bool:
    """Whether a comparison is of this config. It may be older than some parameters, or have some that no longer exist."""
    ours = next(row for row in rows if row["name"] == "autotax")
    same = all(config.values.get(name, value) == value for name, value in ours["config"].items())
    return ours["variant"] == config.variant and same


def short(name: str) -> str:
    plain = name.removesuffix("-graph").replace("_scaled", "").replace("scaled_", "")
    return NAMES.get(plain, plain)


def kind_of(problem: Problem) -> str:
    """`sum on all, block`, or `sum on all` without scales."""
    values = vars(problem)
    kind = "gather" if problem.op == "all-gather-gemm" else {"scattered": "scatter", "replicated": "sum on all"}[values["output"]]
    scales = [] if values["scales"] == "none" else [values["scales"]]
    fast = ["fast"] if values["accumulate"] == "fast" else []
    return ", ".join([kind, *scales, *(["quantised"] if values["quantize"] != "none" else []), *fast])


def size_of(problem: Problem) -> tuple[int, ...]:
    return tuple(vars(problem)[name] for name in ("n", "k", "m"))


def line(problem: Problem, figures: Figures) -> str:
    n, k, m = size_of(problem)
    kind, _, scales = kind_of(problem).partition(", ")
    us, bsp, exact, fast, alone = (
        microseconds(value) if value else "" for value in (figures.us, figures.bsp, figures.exact, figures.fast, figures.alone)
    )
    over, over_all = (f"{value / figures.us:.2f}x" for value in (figures.exact, figures.best))
    problem_cell = f"{kind} {m} x {n} x {k}" + (f", {scales}" if scales else "")
    cells = (problem_cell, f"`{figures.variant}`", us, bsp, f"{exact} (`{figures.exact_name}`)")
    return f"| {' | '.join((*cells, over, fast, over_all, alone))} |"


def means(kind: str, members: list[Figures]) -> str:
    over = [[getattr(own, name) / own.us for own in members] for name in ("bsp", "exact", "best")]
    shown = [f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f})" for ratios in over]
    near = sum(own.us <= EXCESS * own.alone + START_US for own in members if own.alone)
    return f"| {kind} | {len(members)} | " + " | ".join(shown) + f" | {near} |"


def main(folder: Path) -> None:
    winners = {entry.winner.problem.key: entry.winner for entry in formats.read(folder / "winners.json.xz")}
    last: dict[str, list[dict[str, Any]]] = {}
    with lzma.open(folder / "comparisons.jsonl.xz", "rt") as file:
        for text in file:
            record = json.loads(text)
            key, rows = record["key"], record["rows"]
            if key in winners and not record["error"] and (key not in last or is_of(winners[key].config, rows)):
                last[key] = rows
    kinds: dict[str, list[tuple[Problem, Figures]]] = defaultdict(list)
    for key, rows in last.items():
        kinds[kind_of(winners[key].problem)].append((winners[key].problem, figures_of(winners[key].problem, rows)))
    print("| | problems | over BSP | over the best exact | over everything | near the product |\n|---|---|---|---|---|---|")
    for kind, members in sorted(kinds.items()):
        print(means(kind, [figures for _, figures in members]))
    print("\n| problem | winner | us | BSP | exact | over it | fast | over all | alone |\n|---|---|---|---|---|---|---|---|---|")
    for _, members in sorted(kinds.items()):
        for problem, figures in sorted(members, key=lambda member: size_of(member[0])):
            print(line(problem, figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
