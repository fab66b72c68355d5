"""One rank of four on one GPU, as a stand-in for links where there are none; microseconds a call.

The shards of the others lie in its inbox, and a warp beside the kernel raises their flags as if they arrived at the rate of
links, in the order in which peers send. What the rank sends goes to memory that stands for its peers; both the result and that
are compared with what they must be. All configs of a shape are captured in graphs of ten calls and replayed in turn.

    PYTHONPATH=. python results/h200x1/arrivals.py 512x7168x8192 ...
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from autotax import AllGatherGemm
from autotax.config import Config, Value
from autotax.hardware import Hardware, detect
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.delay import now_ns
from autotax.operators.draw import make_inputs, reference
from autotax.operators.expected import relative_error
from autotax.problem import ceil_div
from autotax.spaces import space_for
from tests.gpu.ranks_of_one_gpu import SlabOfMany

RANK, WORLD, CALLS, ROUNDS = 0, 4, 10, 40
LATENCY_US = 3.0
OLD: dict[str, Value] = {"block_k": 64, "block_m": 128, "block_n": 256, "comm": 16, "group_m": 8, "k_groups": 8, "loads": "tma"}
OLD |= {"num_stages": 3, "num_warps": 8, "order": "interleaved", "pieces": 4, "splits": 1, "across": 0}
"""What `push` was tuned to at most of these shapes on four H200."""


@triton.jit
def arrive(flags, events, count, first_ns, step_ns, TARGET: tl.constexpr):
    """Event by event: four flags (-1 for none), then the signals that each gets."""
    start = now_ns(TARGET)
    lanes = tl.arange(0, 4)
    for i in range(count):
        while now_ns(TARGET) - start < first_ns + (i + 1) * step_ns:
            pass
        at = tl.load(events + i * 8 + lanes)
        tl.atomic_add(flags + at, tl.load(events + i * 8 + 4 + lanes), mask=at >= 0, sem="relaxed", scope="sys")


def events_of(problem: AllGatherGemm, config: Config) -> list[int]:
    groups, chunks = int(config["k_groups"]), ceil_div(problem.shard_rows, config["chunk_rows"])
    events: list[int] = []
    for chunk in range(chunks):
        for group in range(groups):
            sources = [source for source in range(WORLD) if source != RANK]
            if config.variant == "push":
                flags, signals = [(group * WORLD + source) * chunks + chunk for source in sources], int(config["pieces"])
            else:
                flags, signals = [(source * chunks + chunk) * groups + group for source in sources], 1
            events += [*flags, -1] + [signals] * 4
    return events


class Arriving:
    """A config on the rank, captured: each call beside the arrivals, at `rate` GB/s in all."""

    def __init__(self, problem: AllGatherGemm, config: Config, hardware: Hardware, rate: float, latency_us: float) -> None:
        device = torch.device("cuda", 0)
        nobody: Any = None  # no groups of processes
        world = World(RANK, WORLD, "cuda", device, nobody, nobody, None)
        inbox_bytes = 2 * problem.m * problem.k * problem.item_size
        self.problem = problem
        self.slabs = [torch.zeros(inbox_bytes + (8 << 20), dtype=torch.uint8, device=device) for _ in range(WORLD)]
        shape = (2, WORLD, problem.shard_rows, problem.shard_cols)
        self.inboxes = [slab[:inbox_bytes].view(torch.bfloat16).view(shape) for slab in self.slabs]
        self.operator: Any = prepare(problem, config, Context(world, SlabOfMany(world, self.slabs), hardware))
        self.call = make_inputs(problem, 0, RANK, device)
        for source in range(WORLD):
            self.inboxes[RANK][:, source] = make_inputs(problem, 0, source, device).tensors[0]
        self.events = torch.tensor(events_of(problem, config), dtype=torch.int32, device=device)
        self.count = len(self.events) // 8
        arriving = (WORLD - 1) * problem.shard_rows * problem.shard_cols * problem.item_size
        self.times = int(latency_us * 1000), int(arriving / rate / self.count)
        self.side, main = torch.cuda.Stream(), torch.cuda.Stream()
        self.run()
        self.check()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=main):
            for _ in range(CALLS):
                self.run()
        self.graph.replay()
        self.check()

    def run(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            arrive[(1,)](self.operator.flags, self.events, self.count, *self.times, TARGET="cuda", num_warps=1)
        self.operator(*self.call.tensors, self.call.out)
        torch.cuda.current_stream().wait_stream(self.side)

    def check(self) -> None:
        """Of one more run: the result, and the own shard in every peer's inbox."""
        torch.cuda.synchronize()
        self.call.poison()
        self.run()
        torch.cuda.synchronize()
        assert self.operator.failure() is None, self.operator.failure()
        assert relative_error(self.call.out, reference(self.problem, 0, RANK, self.call.out.device)) < 5e-3
        for peer in range(1, WORLD):
            assert any(torch.equal(inbox[RANK], self.call.tensors[0]) for inbox in self.inboxes[peer])


def us_of(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / CALLS


def product(problem: AllGatherGemm) -> torch.cuda.CUDAGraph:
    a, b = (torch.randn(rows, problem.k, device="cuda").bfloat16() for rows in (problem.m, problem.n))
    out = torch.empty(problem.m, problem.n, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, b.t(), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            torch.mm(a, b.t(), out=out)
    return graph


def main() -> None:
    hardware = replace(detect(), processors=detect().processors - 1)  # one for the warp that raises flags
    for text in sys.argv[1:]:
        m, n, k = map(int, text.split("x"))
        problem = AllGatherGemm(m, n, k, "bf16", "m", WORLD)
        seeds = space_for(problem, hardware).variants["push_specialized"].seeds
        cases = {"push 330": (Config.of("push", OLD, chunk_rows=problem.shard_rows), 330.0, LATENCY_US)}
        for seed in seeds[:5]:
            name = f"{seed['block_m']}x{seed['block_n']} c{seed['chunk_rows']} k{seed['k_groups']} 330"
            cases[name] = (seed, 330.0, LATENCY_US)
        cases |= {"first 240": (seeds[0], 240.0, LATENCY_US), "first at once": (seeds[0], 1e6, 0.0)}
        runs = {name: Arriving(problem, config, hardware, rate, latency) for name, (config, rate, latency) in cases.items()}
        graphs = {"cublas": product(problem)} | {name: run.graph for name, run in runs.items()}
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                samples[name].append(us_of(graph))
        hot = {name: statistics.median(values) for name, values in samples.items()}
        bound = max(hot["cublas"], 0.75 * m * k * 2 / 375e3)
        told = ", ".join(f"{name} {us:.1f}" for name, us in hot.items())
        print(f"== {m}x{n}x{k}: 1.10 x bound + 6 is {1.1 * bound + 6:.1f}; {told}", flush=True)
        del runs, graphs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
