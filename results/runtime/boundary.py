"""The boundary between two products under sequence parallelism, three ways, in graphs whose weights come from memory:

    PYTHONPATH=. python results/runtime/boundary.py [--db winners.db] [--json boundary.json]

- NCCL: the vendor's product, the reduce-scatter, one kernel that adds and norms, the gather, the vendor's product.
- torch: `fused_matmul_reduce_scatter`, the same kernel, `fused_all_gather_matmul`.
- ours: `LinearReduceScatter(norm=)` and `AllGatherLinear`, with the configs that look-ups answer.

`sum` is the first product, its sum and the norm; `all` is the whole boundary. The ways take turns, replay by replay, and the
results of each are compared with those of NCCL before it is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from norms import add_and_norm, baseline
from torch import Tensor

from autotax.heap import World
from autotax.nn import AllGatherLinear, AllReduceNorm, LinearReduceScatter
from autotax.runner.ranks import RankFailure, run_ranks

ROWS = (512, 1024, 2048, 4096)
HIDDEN, BEFORE, AFTER = 8192, 7168, 7168
"""Columns of the residual, and those of a rank before and after the boundary."""
LAYERS = 2
REPLAYS = 60
ALLOWED = 2e-2
"""Largest error of a result, as a share of eight times its root mean square. A step of bf16 at eight deviations is 0.4 %."""


def measure(world: World, db: str | None) -> list[dict[str, Any]]:
    """The microseconds of each way on this rank, for each number of rows."""
    with torch.no_grad():
        return [ways_of(world, m, db) for m in ROWS]


def ways_of(world: World, m: int, db: str | None) -> dict[str, Any]:
    """The microseconds of each way for this number of rows, and the configs of ours."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=world.device, dtype=torch.bfloat16)

    downs = [drawn(HIDDEN, BEFORE) / BEFORE**0.5 for _ in range(LAYERS)]
    ups = [drawn(AFTER, HIDDEN) / HIDDEN**0.5 for _ in range(LAYERS)]
    x, residual = drawn(m, BEFORE), drawn(m // world.size, HIDDEN)
    weight = torch.ones(HIDDEN, device=world.device, dtype=torch.bfloat16)
    norm, library_norm = AllReduceNorm(HIDDEN, m, sizes=[m], db=db), baseline(world, m // world.size, HIDDEN)
    down = LinearReduceScatter(downs[0], None, m, sizes=[m], db=db, norm=norm)
    up = AllGatherLinear(ups[0], None, m, sizes=[m], db=db)
    layers = [(LinearReduceScatter(b, like=down), AllGatherLinear(c, like=up)) for b, c in zip(downs, ups, strict=True)]
    products, sums, gathered, last = (
        x.new_empty(shape) for shape in ((m, HIDDEN), tuple(residual.shape), (m, HIDDEN), (m, AFTER))
    )
    y, more = torch.empty_like(residual), torch.empty_like(residual)
    name = world.data.group_name

    def nccl(whole: bool) -> list[Tensor]:
        for b, c in zip(downs, ups, strict=True):
            torch.mm(x, b.t(), out=products)
            dist.reduce_scatter_tensor(sums, products)
            add_and_norm(library_norm, sums, residual, weight, more, y)
            if whole:
                dist.all_gather_into_tensor(gathered, y)
                torch.mm(gathered, c.t(), out=last)
        return [y, more, *[last] * whole]

    def fused(whole: bool) -> list[Tensor]:
        after: list[Tensor] = []
        for b, c in zip(downs, ups, strict=True):
            total = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b.t(), "sum", 0, name)
            add_and_norm(library_norm, total, residual, weight, more, y)
            if whole:
                after = torch.ops.symm_mem.fused_all_gather_matmul(y, [c.t()], 0, name)[1]
        return [y, more, *after]

    def ours(whole: bool) -> list[Tensor]:
        after: list[Tensor] = []
        for first, second in layers:
            rows, total = first.normed(x, weight, residual)
            if whole:
                after = [second(rows)]
        return [rows, total, *after]

    return {"m": m, "configs": [str(layer.choices[-1].config) for layer in (down, up)]} | {
        part: timed(world, {"nccl": nccl, "torch": fused, "ours": ours}, whole) for part, whole in (("sum", False), ("all", True))
    }


def timed(world: World, ways: dict[str, Callable[[bool], list[Tensor]]], whole: bool) -> dict[str, float]:
    """The median microseconds of a layer, each way in a graph of its own, the ways by turns."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    right: list[Tensor] = []
    for name, way in ways.items():
        way(whole)
        world.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            results = way(whole)
        for result in results:
            result.fill_(math.nan)  # ways share memory: what one leaves unwritten must not pass as another's
        graphs[name].replay()
        world.synchronize()
        right = right or [result.float() for result in results]
        for result, expected in zip(results, right, strict=True):
            error = float((result.float() - expected).abs().max() / expected.square().mean().sqrt() / 8)
            assert error < ALLOWED, f"{name}: an error of {error:.3g}"
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # the ranks meet
            start.record()
            graph.replay()
            end.record()
            world.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / LAYERS)
    return {name: statistics.median(us) for name, us in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document")
    given = parser.parse_args()
    try:
        ranks = run_ranks(measure, 2, "cuda", given.db, timeout=150)
    except RankFailure as failure:
        print(f"boundary.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    for mine, theirs in zip(*ranks, strict=True):
        for part in ("sum", "all"):
            us = mine[part] = {name: max(mine[part][name], theirs[part][name]) for name in mine[part]}
            print(f"m {mine['m']} {part}: {', '.join(f'{name} {value:.1f}' for name, value in us.items())} us", flush=True)
        print(f"  configs {mine['configs']}")
    if given.json:
        given.json.write_text(json.dumps(ranks[0]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
