"""Decode merge on one GPU: the merge alone against the rate of a copy, and what a call costs the host; a table on stdout.

The merge is the second kernel of `bsp`, given results of all ranks that lie in its memory; buffers are rotated so that the L2
does not hold them. The copy rate is that of the yardstick beside every tuning, 256 MiB read and written. Beside it stands a
copy of as many bytes as the merge moves, in a graph like the merge's. Host time is that of enqueuing one call while the device
is busy, of kernels that give up waiting at once.

    PYTHONPATH=. python results/h200x1/merging.py [BxHxD ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autotax import Config, DecodeMerge
from autotax.hardware import Hardware, detect
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.decode_merge.bsp import merge_kernel
from autotax.kernels.offline import fix_cache_keys
from autotax.kernels.primitives import ERROR
from autotax.operators.verification import make_inputs
from autotax.runner.sampling import Yardstick
from autotax.spaces import space_for
from tests.gpu.ranks_of_one_gpu import SlabOfMany

WORLD, ROUNDS, CALLS = 4, 30, 200
SHAPES = ("256x128x512", "64x128x512", "1024x128x128", "256x64x512")
HEAP_BYTES = 1 << 30
BUSY_CYCLES = 100_000_000


class Alone(Context):
    """A rank whose peers' results are there already: its collectives do nothing."""

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> None:
        pass

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        pass


class MergeOnly(Alone):
    """And whose own result is packed already."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if kernel is merge_kernel:
            super().launch(kernel, grid, *args, **options)


def context_of(kind: type[Context], hardware: Hardware, size: int, polls: int | None = None) -> Context:
    device, nobody = torch.device("cuda", 0), None
    world = World(0, WORLD, "cuda", device, nobody, nobody, None)  # type: ignore[arg-type]
    slabs = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(WORLD if size > 1024 else 1)]
    return kind(world, SlabOfMany(world, slabs * (WORLD // len(slabs))), hardware, polls)


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one call, captured in a graph that makes all of them: the median over replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def copy_gbps() -> float:
    """Bytes read and written, at the clocks of a device that is busy."""
    nobody: Any = None
    yardstick = Yardstick(World(0, 1, "cuda", torch.device("cuda", 0), nobody, nobody, None))
    return max(yardstick.measure().copy_gbps for _ in range(50))


def copy_us(moved: int, hardware: Hardware) -> float:
    """A copy that moves as many bytes, half of them read, of as many buffers as are twice the L2."""
    number = 2 + 2 * hardware.l2_bytes // moved
    pairs = [[torch.zeros(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(number)]
    return microseconds([partial(into.copy_, source) for into, source in pairs])


def merge_us(problem: DecodeMerge, config: Config, hardware: Hardware) -> float:
    """The merge alone, of as many buffers as are twice the L2."""
    number = 2 + 2 * hardware.l2_bytes // (problem.world_size * problem.nbytes)
    calls: list[Callable[[], Any]] = []
    for seed in range(number):
        kernel = prepare(problem, config, context_of(MergeOnly, hardware, 1024))
        call = make_inputs(problem, 2 * seed, 0, torch.device("cuda", 0))
        vars(kernel)["received"].zero_()  # equal weights, and no number that is none
        calls.append(partial(kernel, *call.tensors, call.out))
    return microseconds(calls)


def host_us(problem: DecodeMerge, config: Config, hardware: Hardware) -> float:
    """The median of what enqueuing a call takes."""
    context = context_of(Alone, hardware, HEAP_BYTES, polls=1)
    kernel: Any = prepare(problem, config, context)
    call = make_inputs(problem, 0, 0, torch.device("cuda", 0))
    with context.rehearsal():
        kernel(*call.tensors, call.out)
    kernel.control[ERROR.value] = 1  # so that nothing is waited for
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    times = []
    for _ in range(CALLS):
        before = time.perf_counter_ns()
        kernel(*call.tensors, call.out)
        times.append((time.perf_counter_ns() - before) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def main(*shapes: str) -> None:
    fix_cache_keys()
    hardware, rate = detect("cuda"), copy_gbps()
    print(f"{hardware}\ncopy: {rate:.0f} GB/s, bytes read and written\n")
    print("| batch x heads x head_dim | bytes | best config | merge us | of the copy rate | a copy of as many bytes us |")
    print("|---|---|---|---|---|---|")
    for shape in shapes or SHAPES:
        batch, heads, dim = map(int, shape.split("x"))
        problem = DecodeMerge(batch, heads, dim, "bf16", WORLD)
        space = space_for(problem, hardware).variants["bsp"]
        latencies = {str(config): merge_us(problem, config, hardware) for config in space.configs()}
        best = min(latencies, key=latencies.__getitem__)
        moved = (WORLD + 1) * problem.batch * problem.heads * (dim * problem.item_size + 4)
        share, copied = moved / latencies[best] / 1e3 / rate, copy_us(moved, hardware)
        print(f"| {shape} | {moved / 2**20:.0f} MiB | {best} | {latencies[best]:.1f} | {share:.3f} | {copied:.1f} |", flush=True)
    print("\n| variant | host us a call, batch 16, 64 heads of 128 |\n|---|---|")
    problem = DecodeMerge(16, 64, 128, "bf16", WORLD, "head_scatter")
    space_of_all = space_for(problem, hardware)
    for variant in space_of_all.variants:
        print(f"| {variant} | {host_us(problem, space_of_all.default(variant), hardware):.1f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
