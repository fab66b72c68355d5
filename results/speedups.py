"""Draws the README's plot from the published comparisons of configs that ship, and prints its table and that of four GPUs.

    PYTHONPATH=. python results/speedups.py docs/speedups.svg

A speed-up is the median of the ratios within each interleaved round, as `compare --json` holds it.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from autotax.core.problem import Problem
from autotax.db import shipped
from autotax.db.records import WinnerRecord, same_kernel
from autotax.operators import registry
from autotax.operators.registry import problem_from_dict

RESULTS = Path(__file__).parent
HOSTS = ("h100x2", "h200x2"), ("h100x4", "h200x4")
"""The hosts of the README's table, and the hosts of the table in `results/README.md`."""
OPERATORS = {
    "All-Gather + GEMM": "all-gather-gemm",
    "GEMM + Reduce-Scatter": "gemm-reduce-scatter",
    "FP8 All-Gather + GEMM": "all-gather-gemm",
    "FP8 GEMM + Reduce-Scatter": "gemm-reduce-scatter",
    "All-reduce + norm": "all-reduce-norm",
    "Gather + attention": "gather-attention",
    "Decode merge": "decode-merge",
    "Flash Decode": "flash-decode",
}
"""The rows of the table. A row of FP8 counts the problems whose inputs are in e4m3."""
DRAWN = ("All-Gather + GEMM", "FP8 All-Gather + GEMM", "GEMM + Reduce-Scatter", "Flash Decode")
"""The rows of the table that the plot shows, on four GPUs."""
LEFT, AXIS, ROW = 200, 420, 17
"""Pixels: of the names, of the axis, of a problem."""
MOST = 2.4
"""Where the axis ends."""
BLUE, ORANGE, GREY, PALE = "#0072b2", "#d55e00", "#777777", "#dddddd"


@cache
def shipped_winners() -> dict[tuple[Problem, str], list[WinnerRecord]]:
    """The winners that ship and hold for the kernel sources of now, by problem and device.

    Alternatives of others have no sources here. Their winners hold for one version of torch.
    """
    winners: dict[tuple[Problem, str], list[WinnerRecord]] = {}
    for winner in shipped.winners():
        if same_kernel(winner) or winner.config.variant in registry.of(winner.problem).peers:
            winners.setdefault((winner.problem, winner.hardware.device), []).append(winner)
    return winners


def winner_of(comparison: dict[str, Any]) -> WinnerRecord | None:
    """The shipped winner that has the tuned config of a comparison, of two the one proven in place.

    Parameters may have been added since, at the value that they replace.
    """
    row = next(row for row in comparison["rows"] if row["name"] == "autotax")
    here = shipped_winners().get((problem_from_dict(comparison["problem"]), comparison["hardware"]["device"]), [])
    same = [w for w in here if w.config.variant == row["variant"] and row["config"].items() <= w.config.values.items()]
    return max(same, key=lambda winner: winner.conditions.in_place, default=None)


def over_bsp(comparison: dict[str, Any]) -> float:
    """How many times faster than BSP in a graph the tuned config is."""
    return float(next(row["speedup_vs_bsp"] for row in comparison["rows"] if row["name"] == "autotax"))


def best_alternative(comparison: dict[str, Any]) -> float:
    """How many times faster than BSP in a graph the best alternative is."""
    return over_bsp(comparison) / float(comparison["speedup_vs_best_peer"])


@cache
def published(host: str) -> list[dict[str, Any]]:
    """All comparisons in place of a host."""
    files = sorted((RESULTS / host).glob("*/comparisons.jsonl.xz"))
    return [json.loads(line) for file in files for line in lzma.decompress(file.read_bytes()).splitlines()]


def comparisons(host: str, name: str) -> list[dict[str, Any]]:
    """The comparisons that a row of the table counts: for each problem the last one whose config ships."""
    op, fp8 = OPERATORS[name], name.startswith("FP8")
    last: dict[str, dict[str, Any]] = {}
    for comparison in published(host):
        problem = comparison["problem"]
        if problem["op"] == op and (problem["dtype"] == "e4m3") is fp8 and winner_of(comparison):
            last[json.dumps(problem)] = comparison
    return list(last.values())


def table(hosts: Sequence[str]) -> list[str]:
    """Rows of a table: for each host the number of problems, and geometric means; in parentheses the least."""
    return [f"| {name} | {' | '.join(_cells(comparisons(host, name)) for host in hosts)} |" for name in OPERATORS]


def _cells(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "- | - | -"
    bsp = map(over_bsp, rows)
    alternative = [float(row["speedup_vs_best_peer"]) for row in rows]
    return f"{len(rows)} | {geometric_mean(bsp):.2f}x | {geometric_mean(alternative):.2f}x ({min(alternative):.2f})"


def plot() -> str:
    """One row a problem on four GPUs: the tuned config and the best alternative, in times of BSP in a graph."""
    parts: list[str] = []
    y = 44.0
    groups = [(name, comparisons("h100x4", name)) for name in DRAWN]
    bottom = y + sum(ROW * (len(rows) + 2) for _, rows in groups)
    for tick in [1 + step / 4 for step in range(6)]:
        colour, width = (GREY, 2) if tick == 1 else (PALE, 1)
        parts.append(f'<path d="M{_x(tick):.1f} 30V{bottom:.1f}" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(_words(_x(tick), bottom + 16, f"{tick:g}x", "middle"))
    for name, rows in groups:
        y += ROW
        parts.append(_words(8, y, name, weight="bold"))
        for row in sorted(rows, key=_size):
            y += ROW
            ours, theirs = over_bsp(row), best_alternative(row)
            parts.append(_words(LEFT - 12, y, _label(row["problem"]), "end"))
            parts.append(f'<path d="M{_x(1):.1f} {y - 4:.1f}H{_x(ours):.1f}" stroke="{BLUE}" stroke-width="3"/>')
            parts.append(f'<circle cx="{_x(theirs):.1f}" cy="{y - 4:.1f}" r="4" fill="{ORANGE}"/>')
            parts.append(f'<circle cx="{_x(ours):.1f}" cy="{y - 4:.1f}" r="5" fill="{BLUE}"/>')
            parts.append(_words(_x(ours) + 9, y, f"{ours:.2f}"))
        y += ROW
    parts += [f'<circle cx="{LEFT}" cy="12" r="5" fill="{BLUE}"/>', _words(LEFT + 9, 16, "autotax")]
    parts += [f'<circle cx="{LEFT + 90}" cy="12" r="4" fill="{ORANGE}"/>', _words(LEFT + 99, 16, "best alternative")]
    parts.append(_words(LEFT + 230, 16, "times faster than BSP, in place, 4 x H100"))
    size = f'width="{LEFT + AXIS + 30}" height="{bottom + 26:.0f}"'
    view = f'viewBox="0 0 {LEFT + AXIS + 30} {bottom + 26:.0f}"'
    title = "<title>Speed-up over BSP of the tuned config and of the best alternative, problem by problem</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="sans-serif" font-size="11" role="img">'
    return "\n".join([head, title, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _x(ratio: float) -> float:
    return LEFT + AXIS * (ratio - 0.9) / (MOST - 0.9)


def _size(comparison: dict[str, Any]) -> list[int]:
    problem = comparison["problem"]
    return [problem.get(name, 0) for name in ("n", "k", "m", "kv_len", "q_heads", "batch")]


def _label(problem: dict[str, Any]) -> str:
    if problem["op"] != "flash-decode":
        everywhere = " on all ranks" if problem.get("output") == "replicated" else ""
        return f"{problem['m']} x {problem['n']} x {problem['k']}{everywhere}"
    tokens = f"{math.ceil(problem['kv_len'] / 1024)}K"
    return f"batch {problem['batch']}, {problem['q_heads']} heads, {tokens} tokens"


def _words(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(plot())
    print("\n".join(row for hosts in HOSTS for row in table(hosts)))
