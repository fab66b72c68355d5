"""Two GPUs, each a rank of four: three shards go out to the other over real links, and three come in, as among four.

Both are rank 0, and each stands for all peers of the other: what is sent to the h-th peer lands where that one keeps the
shard of rank h. So the kernel is the one that four ranks launch, with the same boxes, signals and waits. What it leaves out:
several ranks that send to one, and ranks that drift apart. Results and clocks are those of both GPUs, the slower one counts.

    PYTHONPATH=. python results/h200x2/twins.py [--compile] 512x7168x8192 ...
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch

from autotax import AllGatherGemm
from autotax.config import Config, Value
from autotax.hardware import detect
from autotax.heap.base import Heap
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.operators.draw import make_inputs
from autotax.operators.expected import relative_error
from autotax.problem import ceil_div
from autotax.spaces import space_for

WORLD, CALLS, ROUNDS = 4, 20, 30
GPUS = (0, 1)


class TwinHeap(Heap):
    """Rank 0's slab and the other GPU's, moved for each hop: by `shard` bytes for data, by `flags` bytes for signals."""

    def __init__(self, world: World, own: torch.Tensor, other: torch.Tensor, shard: int, flags: int) -> None:
        super().__init__(world)
        self.slab, self.other, self.shard = own, other, shard
        places = [own.data_ptr(), *(other.data_ptr() + hop * flags for hop in range(1, WORLD))]
        self.bases = torch.tensor(places, dtype=torch.int64, device=own.device)

    def peer_slab(self, rank: int) -> torch.Tensor:
        return self.slab if rank == 0 else self.other[rank * self.shard :]

    def close(self) -> None:
        pass


class Twins:
    """A config on both GPUs, captured."""

    def __init__(self, problem: AllGatherGemm, config: Config, dry: bool = False) -> None:
        self.problem = problem
        shard = problem.shard_rows * problem.shard_cols * problem.item_size
        flags = 4 * ceil_div(problem.shard_rows, config.values.get("chunk_rows", problem.shard_rows)) * config["k_groups"]
        slabs = [torch.zeros(11 * shard + (8 << 20), dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in GPUS]
        self.streams = [torch.cuda.Stream(gpu) for gpu in GPUS]
        self.operators: list[Any] = []
        self.calls = [make_inputs(problem, 0, gpu, torch.device("cuda", gpu)) for gpu in GPUS]
        nobody: Any = None
        for gpu in GPUS:
            world = World(0, WORLD, "cuda", torch.device("cuda", gpu), nobody, nobody, None)
            heap = TwinHeap(world, slabs[gpu], slabs[1 - gpu], shard, flags)
            with torch.cuda.device(gpu):
                context = Context(world, heap, detect())
                self.operators.append(self.landed(prepare(problem, config, context), heap))
                with context.rehearsal():
                    self.run(gpu)
        if dry:
            return
        self.each(self.run)
        self.check()
        self.graphs = [[self.capture(gpu, calls) for gpu in GPUS] for calls in (1, CALLS)]

    def landed(self, operator: Any, heap: TwinHeap) -> Any:
        """The operator, whose words for the h-th peer land where that one keeps those of rank h."""
        first = heap.other.data_ptr() + operator.words.data_ptr() - heap.slab.data_ptr()
        places = [first + 16 * hop * operator.room for hop in range(1, WORLD)]
        operator.landings = torch.tensor(places, dtype=torch.int64, device=heap.slab.device)
        return operator

    def run(self, gpu: int) -> None:
        self.operators[gpu](*self.calls[gpu].tensors, self.calls[gpu].out)

    def each(self, work: Any) -> None:
        for gpu in GPUS:
            with torch.cuda.device(gpu), torch.cuda.stream(self.streams[gpu]):
                work(gpu)

    def capture(self, gpu: int, calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(gpu), torch.cuda.graph(graph, stream=self.streams[gpu]):
            for _ in range(calls):
                self.run(gpu)
        return graph

    def check(self) -> None:
        """Of one more run, on both."""
        for gpu in GPUS:
            torch.cuda.synchronize(gpu)
            self.calls[gpu].poison()
            torch.cuda.synchronize(gpu)
        self.each(self.run)
        shards = [call.tensors[0].float() for call in self.calls]
        for gpu in GPUS:
            torch.cuda.synchronize(gpu)
            assert self.operators[gpu].failure() is None, self.operators[gpu].failure()
            own, other = shards[gpu], shards[1 - gpu].to(f"cuda:{gpu}")
            right = torch.cat([own, other, other, other]) @ self.calls[gpu].tensors[1].float().t()
            error = relative_error(self.calls[gpu].out, right)
            assert error < 5e-3, error

    def us(self) -> float:
        """Of a call: after one that both begin and end together, so that neither waits for the launch of the other."""
        return timed(self.streams, *self.graphs)


class Products:
    """cuBLAS on both GPUs, the whole product."""

    def __init__(self, problem: AllGatherGemm) -> None:
        self.streams = [torch.cuda.Stream(gpu) for gpu in GPUS]
        self.graphs: list[list[torch.cuda.CUDAGraph]] = [[], []]
        self.kept: list[torch.Tensor] = []
        for gpu in GPUS:
            with torch.cuda.device(gpu):
                a, b = (torch.randn(rows, problem.k, device="cuda").bfloat16() for rows in (problem.m, problem.n))
                out = torch.empty(problem.m, problem.n, device="cuda", dtype=torch.bfloat16)
                self.kept += [a, b, out]
                torch.mm(a, b.t(), out=out)
                torch.cuda.synchronize()
                for graphs, calls in zip(self.graphs, (1, CALLS), strict=True):
                    graphs.append(torch.cuda.CUDAGraph())
                    with torch.cuda.graph(graphs[-1], stream=self.streams[gpu]):
                        for _ in range(calls):
                            torch.mm(a, b.t(), out=out)

    def us(self) -> float:
        return timed(self.streams, *self.graphs)


def timed(streams: list[torch.cuda.Stream], first: list[torch.cuda.CUDAGraph], then: list[torch.cuda.CUDAGraph]) -> float:
    events = []
    for gpu in GPUS:
        with torch.cuda.device(gpu), torch.cuda.stream(streams[gpu]):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(100_000)  # both graphs are enqueued when the first begins
            first[gpu].replay()
            start.record()
            then[gpu].replay()
            end.record()
            events.append((start, end))
    for _, end in events:
        end.synchronize()
    return max(start.elapsed_time(end) for start, end in events) * 1000 / CALLS


def configs_of(problem: AllGatherGemm) -> dict[str, Config]:
    variants = space_for(problem, detect()).variants
    wanted = list(variants["push_words"].seeds) if "push_words" in variants else []
    if "push_specialized" in variants:
        space = variants["push_specialized"]
        first, *others = space.seeds[:3]
        others_of_first = [{"pace": 300}, {"pace": 350}]
        others_of_first += [{"by_words": columns} for columns in space.parameters["by_words"]]
        others_of_first += [{"k_groups": group} for group in space.parameters["k_groups"] if group in _near(first["k_groups"])]
        wanted += [first, *(changed(first, **other) for other in others_of_first), *others]
    return {named(config): config for config in wanted}


def named(config: Config) -> str:
    tile = f"{config['block_m']}x{config['block_n']}"
    if config.variant == "push_words":
        return f"words {tile}x{config['block_k']} s{config['num_stages']} k{config['k_groups']}"
    return f"{tile} c{config['chunk_rows']} w{config['by_words']} k{config['k_groups']} p{config['pace']}"


def _near(groups: int) -> set[int]:
    return {1, groups // 2, groups * 2}


def changed(config: Config, **values: Value) -> Config:
    return Config.of(config.variant, config.values | values)


def main() -> None:
    torch.ones(1, device="cuda:0").to("cuda:1").to("cuda:0")  # lets each address the other's memory
    dry = sys.argv[1] == "--compile"
    for text in sys.argv[1 + dry :]:
        m, n, k = map(int, text.split("x"))
        problem = AllGatherGemm(m, n, k, "bf16", "m", WORLD)
        runs: dict[str, Any] = {} if dry else {"cublas": Products(problem)}
        for name, config in configs_of(problem).items():
            try:
                runs[name] = Twins(problem, config, dry)
            except Exception as error:  # told, and the others go on
                print(f"   {text} {name}: {type(error).__name__} {str(error)[:200]}", flush=True)
        if dry:
            continue
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                samples[name].append(run.us())
        for run in runs.values():
            if isinstance(run, Twins):
                run.check()
        hot = {name: statistics.median(values) for name, values in samples.items()}
        bound = max(hot["cublas"], 0.75 * problem.m * problem.k * 2 / 375e3)
        told = ", ".join(f"{name} {us:.1f}" for name, us in hot.items())
        print(f"== {text}: 1.10 x bound + 6 is {1.1 * bound + 6:.1f}; {told}", flush=True)
        del runs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
