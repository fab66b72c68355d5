"""Several ways to the same results on two ranks: captured, compared with the first way, and timed by turns."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotax.heap import World
from autotax.runner.ranks import RankFailure, run_ranks

GRAPHS, ROUNDS = 3, 20
"""Of each way. A graph's figure depends on where its buffers lie, so that a way is captured several times."""
ALLOWED = 2e-2
"""Largest error of a result, as a share of eight times its root mean square. A step of bf16 at eight deviations is 0.4 %."""


def timed(world: World, ways: Mapping[str, Callable[[], Sequence[Tensor]]], layers: int) -> dict[str, float]:
    """The median microseconds of a layer, each way in graphs of its own that have so many. Raises AssertionError."""
    graphs: list[tuple[str, torch.cuda.CUDAGraph]] = []
    right: list[Tensor] = []
    for name, way in list(ways.items()) * GRAPHS:
        way()
        world.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = way()
        for result in results:
            result.fill_(math.nan)  # ways share memory: what one leaves unwritten must not pass as another's
        graph.replay()
        world.synchronize()
        right = right or [result.float() for result in results]
        for result, expected in zip(results, right, strict=True):
            error = float((result.float() - expected).abs().max() / expected.square().mean().sqrt() / 8)
            assert error < ALLOWED, f"{name}: an error of {error:.3g}"
        graphs.append((name, graph))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)  # of all ranks
    for _ in range(ROUNDS):
        order.shuffle(graphs)
        for name, graph in graphs:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # the ranks meet
            start.record()
            graph.replay()
            end.record()
            world.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / layers)
    return {name: statistics.median(us) for name, us in samples.items()}


def slower(mine: Any, theirs: Any) -> Any:
    """The greater of two numbers, also within dictionaries and lists of equal form; all else is this rank's."""
    if isinstance(mine, dict):
        return {name: slower(mine[name], theirs[name]) for name in mine}
    if isinstance(mine, list):
        return [slower(*pair) for pair in zip(mine, theirs, strict=True)]
    return max(mine, theirs) if isinstance(mine, float) else mine


def main(about: str, measure: Callable[[World, str | None], list[dict[str, Any]]], show: Callable[[dict[str, Any]], str]) -> int:
    """Runs `measure(world, database)` on two GPUs, prints what `show` makes of each record, and writes all as JSON."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document")
    options = parser.parse_args()
    try:
        records = slower(*run_ranks(measure, 2, "cuda", options.db, timeout=300))
    except RankFailure as failure:
        print(f"{parser.prog}: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    print("\n".join(map(show, records)))
    if options.json:
        options.json.write_text(json.dumps(records) + "\n")
    return 0
