"""Torch's fused operators, and their steps in memory that is allocated once: captured, microseconds a call, 2 GPUs."""

from __future__ import annotations

import statistics

import torch
import torch.distributed._symmetric_memory  # registers the operators

from autotax.core.config import Config
from autotax.hardware import detect
from autotax.heap import open_heap
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.runner.ranks import Ranks

CALLS, REPLAYS = 40, 15


def took(world: World, call: object) -> float:
    """The median over replays of a graph of calls."""
    for _ in range(3):
        call()  # type: ignore[operator]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()  # type: ignore[operator]
    latencies = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        world.barrier()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        latencies.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(latencies)


def both(world: World, m: int, n: int, k: int, scatters: bool) -> tuple[float, float, bool]:
    """Torch's operator, its steps, and whether the bits are equal."""
    heap, group = open_heap(world, 1 << 20), world.data.group_name
    kind = GemmReduceScatter if scatters else AllGatherGemm
    problem = kind(m, n, k, world_size=world.size)
    kernel = prepare(problem, Config("torch_pipeline"), Context(world, heap, detect()))
    a = torch.randn(m if scatters else m // world.size, k, device=world.device).bfloat16()
    b = torch.randn(n, k, device=world.device).bfloat16()
    out = torch.empty(m // world.size if scatters else m, n, device=world.device, dtype=a.dtype)

    def theirs() -> torch.Tensor:
        if scatters:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b.t(), "sum", 0, group)
        return torch.ops.symm_mem.fused_all_gather_matmul(a, [b.t()], 0, group)[1][0]

    kernel(a, b, out)
    equal = torch.equal(theirs(), out)
    return took(world, theirs), took(world, lambda: kernel(a, b, out)), equal


if __name__ == "__main__":
    with Ranks(2, "cuda") as ranks:
        for scatters in (False, True):
            for m, n, k in ((512, 7168, 8192), (2048, 2560, 8192)) if not scatters else ((512, 8192, 2560), (2048, 8192, 7168)):
                print("scatter" if scatters else "gather", m, n, k, ranks.run(both, m, n, k, scatters), flush=True)
