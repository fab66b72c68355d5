"""How long each kernel of a decode step takes, in the stack on NCCL, with Flash Decode of ours, and with all modules of ours.

    PYTHONPATH=. python results/runtime/kernels.py [--db winners.db] [--json kernels.json]

The stacks are those of `parts.py`. A graph of each is traced in replays without a pause; results are compared there. A figure is
the median of the replays: of a kernel, and of the time since the end of the kernel before it. It is that of the slower rank.

In two of the editions the input of the gate and up product is copied: to one place that all stacks share, or to new memory of the
graph. They tell whether the product's time depends on where its input lies, or on one more kernel before it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import torch
from parts import DECODE, LAYERS, caches_of, editions, mixed
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from turns import main
from work import decoding, draw

from autotax.heap import World

STACKS = {"nccl": (), "attention": ("attention",), "all": ("qkv", "gate_up", "o", "down", "attention")}
"""The modules of ours in each stack."""
COPIES = "", "to one place", "to new memory"
REPLAYS, NAMED = 20, 60
"""Replays of a trace, and how many letters of a kernel's name are kept."""


def measure(world: World, db: str | None) -> list[dict[str, Any]]:
    records = []
    with torch.no_grad():
        plan, weights, ours, theirs = editions(world, db)
        for batch in DECODE:
            caches, x = caches_of(world, plan, batch), draw(world, plan, batch, 0)
            place = torch.empty_like(x)
            for (name, modules), copied in product(STACKS.items(), COPIES):
                stack = mixed(plan.sizes, weights, ours, theirs, modules)
                for layer in stack.layers if copied else []:
                    layer.norms[1] = Copying(layer.norms[1], place if copied == COPIES[1] else None)
                kernels = traced(world, decoding(stack, caches), x)
                records.append({"batch": batch, "stack": name, "copied": copied, "kernels": kernels})
    return records


class Copying(nn.Module):
    """A norm whose result is copied to `place`, or to new memory."""

    def __init__(self, norm: nn.Module, place: Tensor | None) -> None:
        super().__init__()
        self.norm, self.place = norm, place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y.clone() if self.place is None else self.place.copy_(y)


def traced(world: World, run: Callable[[Tensor], Tensor], x: Tensor) -> list[list[Any]]:
    """Each kernel of a replay: its name, its microseconds, and those since the end of the kernel before."""
    run(x)
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x)
    graph.replay()
    world.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(REPLAYS):
            graph.replay()
        world.synchronize()
    events = trace.profiler.kineto_results.events()
    spans = sorted((event.start_ns(), event.duration_ns(), event.name()) for event in events if event.duration_ns())
    spans = [span for span in spans if not span[2].startswith("cuda")]  # calls of the host
    idle = [0, *(start - before - lasted for (before, lasted, _), (start, _, _) in pairwise(spans))]
    count = len(spans) // REPLAYS  # a barrier ends the trace

    def kernel(place: int) -> list[Any]:
        replays = range(place, REPLAYS * count, count)
        times = ([spans[at][1] for at in replays], [idle[at] for at in replays])
        return [spans[place][2][:NAMED], *(statistics.median(nanoseconds) / 1e3 for nanoseconds in times)]

    return [kernel(place) for place in range(count)]


def show(record: dict[str, Any]) -> str:
    """The kernels of the second layer."""
    count = len(record["kernels"]) // LAYERS
    lines = [f"  {us:6.1f} us behind {idle:4.1f} us: {name}" for name, us, idle in record["kernels"][count : 2 * count]]
    copied = f", its input copied {record['copied']}" if record["copied"] else ""
    return "\n".join([f"decode of {record['batch']}, {record['stack']}{copied}", *lines])


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, show))
