"""How long each kernel of a decode step takes, in the stack on NCCL, with Flash Decode of ours, and with all modules of ours.

    PYTHONPATH=. python results/runtime/kernels.py [--db winners.db] [--json kernels.json]

The stacks are those of `parts.py`. A graph of each is traced in replays without a pause; results are compared there. A figure is
the median of the replays: of a kernel, and of the time since the end of the kernel before it. It is that of the slower rank.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from parts import DECODE, LAYERS, caches_of, editions, mixed
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from turns import main
from work import decoding, draw

from autotax.heap import World

STACKS = {"nccl": (), "attention": ("attention",), "all": ("qkv", "gate_up", "o", "down", "attention")}
"""The modules of ours in each stack."""
REPLAYS, NAMED = 20, 60
"""Replays of a trace, and how many letters of a kernel's name are kept."""


def measure(world: World, db: str | None) -> list[dict[str, Any]]:
    records = []
    with torch.no_grad():
        plan, weights, ours, theirs = editions(world, db)
        for batch in DECODE:
            caches, x = caches_of(world, plan, batch), draw(world, plan, batch, 0)
            for name, modules in STACKS.items():
                stack = mixed(plan.sizes, weights, ours, theirs, modules)
                records.append({"batch": batch, "stack": name, "kernels": traced(world, decoding(stack, caches), x)})
    return records


def traced(world: World, run: Callable[[Tensor], Tensor], x: Tensor) -> list[list[Any]]:
    """Each kernel of a replay: its name, its microseconds, and those since the end of the kernel before."""
    run(x)
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x)
    spans = replayed(graph, REPLAYS, world.synchronize)
    idle = [0, *(start - before - lasted for (before, lasted, _), (start, _, _) in pairwise(spans))]
    count = len(spans) // REPLAYS  # a barrier ends the trace

    def kernel(place: int) -> list[Any]:
        replays = range(place, REPLAYS * count, count)
        times = ([spans[at][1] for at in replays], [idle[at] for at in replays])
        return [spans[place][2][:NAMED], *(statistics.median(nanoseconds) / 1e3 for nanoseconds in times)]

    return [kernel(place) for place in range(count)]


def replayed(graph: torch.cuda.CUDAGraph, count: int, synchronize: Callable[[], object]) -> list[tuple[int, int, str]]:
    """The start, the nanoseconds and the name of each kernel of so many replays."""
    graph.replay()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(count):
            graph.replay()
        synchronize()
    events = trace.profiler.kineto_results.events()
    spans = sorted((event.start_ns(), event.duration_ns(), event.name()) for event in events if event.duration_ns())
    return [span for span in spans if not span[2].startswith("cuda")]  # the others are calls of the host


def show(record: dict[str, Any]) -> str:
    """The kernels of the second layer."""
    count = len(record["kernels"]) // LAYERS
    lines = [f"  {us:6.1f} us behind {idle:4.1f} us: {name}" for name, us, idle in record["kernels"][count : 2 * count]]
    return "\n".join([f"decode of {record['batch']}, {record['stack']}", *lines])


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, show))
