"""Draws the README's plot from the published comparisons of configs that ship, and prints its table.

    PYTHONPATH=. python results/speedups.py docs/speedups.svg

A speed-up is the median of the ratios within each interleaved round, as `compare --json` holds it.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import shipped
from autotax.db.records import same_kernel
from autotax.operators import registry
from autotax.operators.registry import problem_from_dict

RESULTS = Path(__file__).parent
OPERATORS = {"all-gather-gemm": "All-Gather + GEMM", "flash-decode": "Flash Decode"}
HOSTS = {"h200x4": "4 x H200", "h200x2": "2 x H200"}
IN_PLACE = (
    ("h100x2/in-place", "all-gather-gemm", "All-Gather + GEMM*, 2 x H100"),
    ("h100x2/in-place", "gemm-reduce-scatter", "GEMM + Reduce-Scatter*, 2 x H100"),
    ("h100x2/in-place", "decode-merge", "Decode merge*, 2 x H100"),
    ("h100x2/all-reduce-norm", "all-reduce-norm", "All-reduce + norm*, 2 x H100"),
    ("h100x2/fp8", "all-gather-gemm", "FP8 All-Gather + GEMM*, 2 x H100"),
    ("h100x2/fp8", "gemm-reduce-scatter", "FP8 GEMM + Reduce-Scatter*, 2 x H100"),
    ("h100x2/gather-attention", "gather-attention", "Gather + attention*, 2 x H100"),
)
"""Folders of `tables.py`, an operator of each, and their rows of the table."""
LEFT, AXIS, ROW = 190, 420, 17
"""Pixels: of the names, of the axis, of a problem."""
MOST = 2.4
"""Where the axis ends."""
BLUE, ORANGE, GREY, PALE = "#0072b2", "#d55e00", "#777777", "#dddddd"


def comparisons(host: str, operator: str) -> list[dict[str, Any]]:
    """The published ones of configs that ship, without `shard="k"`, which torch's operator does not do."""
    told = json.loads(lzma.decompress((RESULTS / host / operator / "compare.json.xz").read_bytes()))
    found = told if isinstance(told, list) else told["results"]  # a list: documents of before schema versions
    return [each for each in found if each["problem"].get("shard", "m") == "m" and ships(each)]


@cache
def shipped_configs() -> dict[tuple[Problem, str], list[Config]]:
    """The configs that ship and hold for the kernel sources of now, by problem and device.

    Alternatives of others have no sources here. Their winners hold for one version of torch.
    """
    found: dict[tuple[Problem, str], list[Config]] = {}
    for winner in shipped.winners():
        if same_kernel(winner) or winner.config.variant in registry.of(winner.problem).peers:
            found.setdefault((winner.problem, winner.hardware.device), []).append(winner.config)
    return found


def ships(comparison: dict[str, Any]) -> bool:
    """Whether the tuned config of a comparison ships. Parameters may have been added since, at the value that they replace."""
    row = next(row for row in comparison["rows"] if row["name"] == "autotax")
    here = shipped_configs().get((problem_from_dict(comparison["problem"]), comparison["hardware"]["device"]), [])
    return any(config.variant == row["variant"] and row["config"].items() <= config.values.items() for config in here)


def over_bsp(comparison: dict[str, Any]) -> float:
    """How many times faster than BSP in a graph the tuned config is."""
    return float(next(row["speedup_vs_bsp"] for row in comparison["rows"] if row["name"] == "autotax"))


def best_alternative(comparison: dict[str, Any]) -> float:
    """How many times faster than BSP in a graph the best alternative is."""
    return over_bsp(comparison) / float(comparison["speedup_vs_best_peer"])


def in_place(folder: str, operator: str) -> list[dict[str, Any]]:
    """The comparisons of an operator in a folder of `tables.py`, of configs that ship."""
    lines = lzma.decompress((RESULTS / folder / "comparisons.jsonl.xz").read_bytes()).splitlines()
    return [each for each in map(json.loads, lines) if each["problem"]["op"] == operator and ships(each)]


def table() -> list[str]:
    """The rows of the README's table: geometric means, in parentheses the least and the greatest."""
    groups = [
        (f"{name}, {machine}", comparisons(host, operator))
        for host, machine in HOSTS.items()
        for operator, name in OPERATORS.items()
    ]
    rows = []
    for name, found in [*groups, *((name, in_place(folder, operator)) for folder, operator, name in IN_PLACE)]:
        bsp = [over_bsp(each) for each in found]
        alternative = [float(each["speedup_vs_best_peer"]) for each in found]
        spans = [f"{geometric_mean(some):.2f}x ({min(some):.2f}-{max(some):.2f})" for some in (bsp, alternative)]
        rows.append(f"| {name} | {len(found)} | {spans[0]} | {spans[1]} |")
    return rows


def plot() -> str:
    """One row a problem on four GPUs: the tuned config and the best alternative, in times of BSP in a graph."""
    parts: list[str] = []
    y = 44.0
    groups = [(name, comparisons("h200x4", operator)) for operator, name in OPERATORS.items()]
    bottom = y + sum(ROW * (len(found) + 2) for _, found in groups)
    for tick in [1 + step / 4 for step in range(6)]:
        colour, width = (GREY, 2) if tick == 1 else (PALE, 1)
        parts.append(f'<path d="M{_x(tick):.1f} 30V{bottom:.1f}" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(_words(_x(tick), bottom + 16, f"{tick:g}x", "middle"))
    for name, found in groups:
        y += ROW
        parts.append(_words(8, y, name, weight="bold"))
        for each in found:
            y += ROW
            ours, theirs = over_bsp(each), best_alternative(each)
            parts.append(_words(LEFT - 12, y, _label(each["problem"]), "end"))
            parts.append(f'<path d="M{_x(1):.1f} {y - 4:.1f}H{_x(ours):.1f}" stroke="{BLUE}" stroke-width="3"/>')
            parts.append(f'<circle cx="{_x(theirs):.1f}" cy="{y - 4:.1f}" r="4" fill="{ORANGE}"/>')
            parts.append(f'<circle cx="{_x(ours):.1f}" cy="{y - 4:.1f}" r="5" fill="{BLUE}"/>')
            parts.append(_words(_x(ours) + 9, y, f"{ours:.2f}"))
        y += ROW
    parts += [f'<circle cx="{LEFT}" cy="12" r="5" fill="{BLUE}"/>', _words(LEFT + 9, 16, "autotax")]
    parts += [f'<circle cx="{LEFT + 90}" cy="12" r="4" fill="{ORANGE}"/>', _words(LEFT + 99, 16, "best alternative")]
    parts.append(_words(LEFT + 230, 16, "times faster than BSP, 4 x H200, bf16"))
    size = f'width="{LEFT + AXIS + 30}" height="{bottom + 26:.0f}"'
    view = f'viewBox="0 0 {LEFT + AXIS + 30} {bottom + 26:.0f}"'
    title = "<title>Speed-up over BSP of the tuned config and of the best alternative, problem by problem</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="sans-serif" font-size="11" role="img">'
    return "\n".join([head, title, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _x(ratio: float) -> float:
    return LEFT + AXIS * (ratio - 0.9) / (MOST - 0.9)


def _label(problem: dict[str, Any]) -> str:
    if problem["op"] == "all-gather-gemm":
        return f"{problem['m']} x {problem['n']} x {problem['k']}"
    tokens = f"{math.ceil(problem['kv_len'] / 1024)}K"
    return f"batch {problem['batch']}, {problem['q_heads']} heads, {tokens} tokens"


def _words(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(plot())
    print("\n".join(table()))
