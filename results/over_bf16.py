"""How many times faster winners in FP8 are than those of the same sizes in bf16, as Markdown:

    PYTHONPATH=. python results/over_bf16.py

Of winners that ship, in place, from 512 rows on: the number of problems, the geometric mean, and in parentheses the least. Both
figures of a problem are of runs of their own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from statistics import geometric_mean

from autotax.core.problem import Problem
from results.last import kind_of
from results.speedups import shipped_winners

OPS = ("all-gather-gemm", "gemm-reduce-scatter")
LEAST_ROWS = 512
SIZES = ("m", "n", "k", "world_size", "weight", "shard", "output")


def sizes_of(problem: Problem) -> tuple[object, ...]:
    """The fields that a problem in FP8 shares with that in bf16."""
    return (problem.op, *(getattr(problem, field.name) for field in fields(problem) if field.name in SIZES))


def main() -> None:
    bf16: dict[tuple[object, ...], float] = {}
    fp8: list[tuple[str, Problem, float]] = []
    for (problem, device), winners in shipped_winners().items():
        in_place = [winner.latency_us for winner in winners if winner.conditions.in_place]
        if in_place and problem.op in OPS and vars(problem)["m"] >= LEAST_ROWS:
            if vars(problem)["dtype"] == "e4m3":
                fp8.append((device, problem, in_place[0]))
            elif vars(problem)["dtype"] == "bf16":
                bf16[(device, *sizes_of(problem))] = in_place[0]
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for device, problem, us in fp8:
        if before := bf16.get((device, *sizes_of(problem))):
            kinds[f"{problem.world_size} x {device.split()[1]}", kind_of(problem)].append(before / us)
    print("| | | problems | over bf16 |\n|---|---|---|---|")
    for (host, kind), ratios in sorted(kinds.items()):
        print(f"| {host} | {kind} | {len(ratios)} | {geometric_mean(ratios):.2f}x ({min(ratios):.2f}) |")


if __name__ == "__main__":
    main()
