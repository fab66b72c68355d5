"""GEMM + Reduce-Scatter on one GPU: a rank of four that computes, sends and adds up, against cuBLAS alone; microseconds a call.

The rank sends to memory of the same GPU, which stands for its peers. `sent` computes and sends only: its kernel is that
of the variant, with an addition that does nothing. `core` adds up too: a small kernel raises all flags of the peers before the
call. In `links` a warp beside the kernel raises flags as fast as links and the peers' own products allow. The rows that the
rank adds up, and all that it sends, are compared with the products of cuBLAS. The configs of a shape are captured in graphs of
ten calls and replayed in turn.

    PYTHONPATH=. python results/h200x1/sending.py [MxNxK ...]
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon

from autotax import GemmReduceScatter
from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div
from autotax.hardware import Hardware, detect
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.alignment import now_ns
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter import push, push_specialized, scatter_roles
from autotax.kernels.offline import fix_cache_keys
from autotax.operators.verification import make_inputs, relative_error
from autotax.runner.precompile import CompileAhead
from autotax.spaces import space_for
from results.copies import copy_of
from tests.gpu.ranks_of_one_gpu import SlabOfMany

RANK, WORLD, CALLS, ROUNDS = 0, 4, 10, 30
LATENCY_US, LINK_GBPS = 3.0, 330.0
SHAPES: tuple[str, ...] = ("512x8192x7168", "1024x8192x7168", "2048x8192x7168", "8192x8192x7168")
SHAPES += ("2048x8192x2560", "8192x8192x2560")
SHAPES += ("2048x4096x1536", "8192x4096x1536", "8192x7168x768")
WAYS: tuple[dict[str, Value], ...] = (
    {"block_m": 128, "block_n": 256, "num_warps": 8, "num_stages": 3},
    {"block_m": 128, "block_n": 256, "num_warps": 8, "num_stages": 3, "flat": 1},
    {"block_m": 128, "block_n": 256, "num_warps": 8, "num_stages": 3, "signals": "at_once"},
    {"block_m": 128, "block_n": 256, "num_warps": 8, "num_stages": 4, "adders": 8},
    {"block_m": 128, "block_n": 128, "num_warps": 4, "num_stages": 5},
)
COMPILERS = 16


@triton.jit
def arrive(flags, order, count, first_ns, step_ns, TARGET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raises one flag after another by one."""
    start = now_ns(TARGET)
    for i in range(count):
        while now_ns(TARGET) - start < first_ns + i * step_ns:
            pass
        tl.atomic_add(flags + tl.load(order + i), 1, sem="relaxed", scope="sys")


@triton.jit
def add_nothing(  # type: ignore[no-untyped-def]
    out, bias, residual, added, box, sums, sum_counts, sum_told, flags, sum_flags, bases, control, rank, epoch, m, n, rows, room,
    WORLD: tl.constexpr, PULL: tl.constexpr, REPLICATED: tl.constexpr, TILES: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED_N: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """In the place of `reduction.add_up`."""


@gluon.jit
def add_no_tiles(  # type: ignore[no-untyped-def]
    out, bias, residual, added, box, room, n, m, epoch, there, taken, share,
    WORLD: tl.constexpr, GROUP_M: tl.constexpr, HIGH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """In the place of `scatter_roles.add_tiles`."""


@gluon.jit
def poll_no_tiles(  # type: ignore[no-untyped-def]
    flags, epoch, control, there, taken, share,
    WORLD: tl.constexpr, GROUP_M: tl.constexpr, HIGH: tl.constexpr, TALL: tl.constexpr, AHEAD: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """In the place of `scatter_roles.poll_tiles`."""


WITHOUT_ADDERS = copy_of(scatter_roles, "only_sends", add_tiles=add_no_tiles, poll_tiles=poll_no_tiles)
ONLY_SENDING: dict[str, Any] = {
    "push": copy_of(push, "only_sends", add_up=add_nothing).Push,
    "push_specialized": copy_of(push_specialized, "only_sends", scatter_tiles=WITHOUT_ADDERS.scatter_tiles).PushSpecialized,
}


def configs(problem: GemmReduceScatter, hardware: Hardware) -> list[Config]:
    """A few tiles of either variant, beside the first seeds."""
    space = space_for(problem, hardware)
    usual = space.default("push").values | {"block_k": 64, "splits": 1, "group_m": 8, "flat": 0, "flag_tiles": 1}
    candidates = [*space.variants["push"].seeds[:2], *(Config.of("push", usual | way) for way in WAYS)]
    roles = space.variants["push_specialized"].seeds
    candidates += [Config.of(config.variant, config.values | {"adds": "warps"}) for config in roles if config["group_m"] == 8]
    return [config for config in dict.fromkeys(candidates) if config in space]


class Sending:
    """A config on the rank, captured; with `paced` flags rise beside each call."""

    def __init__(
        self,
        problem: GemmReduceScatter,
        config: Config,
        hardware: Hardware,
        product_us: float,
        *,
        paced: bool = False,
        adds: bool = True,
    ) -> None:
        device = torch.device("cuda", 0)
        nobody: Any = None  # no groups of processes
        world = World(RANK, WORLD, "cuda", device, nobody, nobody, None)
        item = 4 if config.values.get("payload") == "fp32" else problem.item_size
        size = 2 * WORLD * problem.shard_rows * problem.n * item + (16 << 20)
        self.problem, self.adds = problem, adds
        self.slabs = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(WORLD)]
        context = Context(world, SlabOfMany(world, self.slabs), hardware)
        self.operator: Any = prepare(problem, config, context) if adds else ONLY_SENDING[config.variant](problem, config, context)
        self.call = make_inputs(problem, 0, RANK, device)
        self.heap = self.operator.context.heap
        space: Any = vars(self.operator).get("workspace", self.operator)
        self.box, self.flags = space.box, space.flags
        self.partial = self.call.tensors[0] @ self.call.tensors[1].t()
        for source in range(1, WORLD):
            self.box[:, source].normal_()
        self.paced, self.side, main = paced, torch.cuda.Stream(), torch.cuda.Stream()
        numbers = torch.arange(self.flags.numel(), dtype=torch.int32, device=device)
        by_tile = numbers.view(-1, WORLD) if config.variant == "push_specialized" else numbers.view(WORLD, -1).t()
        self.order = by_tile[:, 1:].contiguous().view(-1)  # flag after flag of every source
        tile_us = product_us / max(1.0, ceil_div(problem.m, config["block_m"]) * ceil_div(problem.n, config["block_n"]) / 132)
        sent = (WORLD - 1) * problem.shard_rows * problem.n * item
        whole_us = max(sent / (LINK_GBPS * 1e3), product_us * (WORLD - 1) / WORLD - tile_us)
        self.times = int((LATENCY_US + tile_us) * 1000), int(whole_us * 1000 / len(self.order))
        self.raised = torch.zeros_like(self.flags)
        self.raised[self.order] = 1
        self.run()
        self.check()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=main):
            for _ in range(CALLS):
                self.run()
        self.graph.replay()
        self.check()

    def run(self) -> None:
        if self.paced:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                arrive[(1,)](self.flags, self.order, len(self.order), *self.times, TARGET="cuda", num_warps=1)
        elif self.adds:
            self.flags += self.raised  # part of what is timed: 2 us
        self.operator(*self.call.tensors, self.call.out)
        if self.paced:
            torch.cuda.current_stream().wait_stream(self.side)

    def check(self) -> None:
        """Of one more run: the rows that are added up, and every tile that was sent."""
        torch.cuda.synchronize()
        self.call.poison()
        for slot in self.box:
            slot[RANK].fill_(math.nan)
        for peer in range(1, WORLD):
            self.heap.peer(self.box, peer).fill_(math.nan)
        self.run()
        torch.cuda.synchronize()
        assert self.operator.failure() is None, self.operator.failure()
        rows = self.problem.shard_rows
        slot = next(slot for slot in range(2) if not self.box[slot, RANK].isnan().any())
        assert relative_error(self.box[slot, RANK], self.partial[:rows].float()) < 5e-3
        if self.adds:
            right = self.partial[:rows].float() + self.box[slot, 1:].float().sum(0)
            assert relative_error(self.call.out, right) < 5e-3
        for peer in range(1, WORLD):
            sent, right = self.heap.peer(self.box, peer)[slot, RANK], self.partial[peer * rows : (peer + 1) * rows]
            assert relative_error(sent, right.float()) < 5e-3, peer


def us_of(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / CALLS


def product(problem: GemmReduceScatter) -> torch.cuda.CUDAGraph:
    a, b = make_inputs(problem, 0, RANK, torch.device("cuda", 0)).tensors
    out = torch.empty(problem.m, problem.n, device="cuda", dtype=a.dtype)
    torch.mm(a, b.t(), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            torch.mm(a, b.t(), out=out)
    return graph


def name(config: Config) -> str:
    tile = f"{config['block_m']}x{config['block_n']}x{config['num_stages']}"
    if config.variant == "push_specialized":
        return f"roles {tile} {config['order']}"
    return f"{tile} {config['signals']} adders {config['adders']} flat {config['flat']}"


def main() -> None:
    fix_cache_keys()  # so that kernels that were compiled ahead are found
    hardware = detect()
    apart = replace(hardware, processors=hardware.processors - 1)  # one for the warp that raises flags
    problems = []
    for text in sys.argv[1:] or SHAPES:
        m, n, k = map(int, text.split("x"))
        problems.append(GemmReduceScatter(m, n, k, "bf16", "scattered", WORLD))
    compilers = CompileAhead(hardware, COMPILERS)
    for problem in problems:
        compilers.expect(problem, configs(problem, hardware))
    kinds = ("sent", "core", "links")
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for problem in problems:
        vendor = product(problem)
        vendor.replay()
        alone = statistics.median(us_of(vendor) for _ in range(5))
        graphs: dict[str, Any] = {"cublas": vendor}
        for config in configs(problem, hardware):
            compilers.outcome(problem, config)
            try:
                graphs[f"sent {name(config)}"] = Sending(problem, config, hardware, alone, adds=False)
                graphs[f"core {name(config)}"] = Sending(problem, config, hardware, alone)
                graphs[f"links {name(config)}"] = Sending(problem, config, apart, alone, paced=True)
            except Exception as error:
                print(f"   {name(config)}: {type(error).__name__} {str(error)[:200]}")
        us: dict[str, list[float]] = {label: [] for label in graphs}
        for _ in range(ROUNDS):
            for label, graph in graphs.items():
                us[label].append(us_of(graph if label == "cublas" else graph.graph))
        medians = {label: statistics.median(samples) for label, samples in us.items()}
        own = medians.pop("cublas")
        print(f"== {problem.m}x{problem.n}x{problem.k}: cublas {own:.1f}")
        for kind in kinds:
            for family in (" roles", ""):
                ranking = sorted((label for label in medians if label.startswith(kind + family)), key=medians.__getitem__)
                entries = (f"{label} {medians[label]:.1f} {own / medians[label]:.3f}" for label in ranking[:3])
                print("   " + "; ".join(entries), flush=True)
            if ranking:
                ratios[kind].append(own / medians[ranking[0]])
        del graphs
        torch.cuda.empty_cache()
    compilers.close()
    for kind, speedups in ratios.items():
        print(f"cuBLAS over the best {kind}: mean {statistics.mean(speedups):.3f}, least {min(speedups):.3f}")


if __name__ == "__main__":
    main()
