"""Times of `decomposed` with 1, 2, 4 and 8 adding programs a processor, and of the adding kernel alone by torch's profiler:

    PYTHONPATH=. python results/h200x2/gemm-reduce-scatter/adding_programs.py

Each line is the median of five replays of a graph of four calls, on each rank. Tuning verifies outputs, this does not.
"""

from __future__ import annotations

from statistics import median

import torch

from autotax.core.config import Config
from autotax.heap import World
from autotax.kernels.gemm_reduce_scatter import decomposed
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.verification import make_inputs
from autotax.runner.ranks import Ranks
from autotax.testing import operators

HEAP_BYTES = 1 << 30
CALLS, REPLAYS = 4, 5
PROBLEMS = [
    GemmReduceScatter(8192, 7168, 8192, "e4m3", scales="block", world_size=2),
    GemmReduceScatter(4096, 5120, 12800, "e4m3", scales="block", world_size=2),
    GemmReduceScatter(2048, 8192, 14336, "e4m3", scales="row", world_size=2),
    GemmReduceScatter(1024, 7168, 9216, "e4m3", scales="block", world_size=2),
    GemmReduceScatter(2048, 8192, 7168, world_size=2),
    GemmReduceScatter(8192, 8192, 2560, world_size=2),
    GemmReduceScatter(2048, 8192, 2560, output="replicated", world_size=2),
]  # fmt: skip
KERNELS = ("add_kernel", "receive_kernel")


def measured(world: World, problem: GemmReduceScatter, config: Config, programs: int) -> tuple[float, list[float]]:
    """Microseconds of a call, and of each kernel that adds up or receives sums in one replay."""
    decomposed.PER_PROCESSOR, operators.HEAP_BYTES = programs, HEAP_BYTES
    context, kernel = operators.ready(world, problem, config)
    call = make_inputs(problem, 0, world.rank, world.device)
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        kernel(*call.tensors, call.out)
    world.synchronize()
    world.barrier()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            kernel(*call.tensors, call.out)
    times = []
    for _ in range(REPLAYS + 2):
        world.synchronize()
        world.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        world.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    world.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        world.synchronize()
    seen = [event.time_range.end - event.time_range.start for event in profile.events() if event.name in KERNELS]
    context.heap.close()
    return median(times[2:]), seen


def main() -> None:
    with Ranks(2, "cuda") as ranks:
        for problem in PROBLEMS:
            config = Config.of("decomposed", comm=1, products="each", sender="engine")
            if problem.scales != "none":
                config = Config.of("scaled_decomposed", config.values | {"product": "library", "splits": 1})
            for programs in (1, 2, 4, 8):
                ended = ranks.run(measured, problem, config, programs, timeout=60)
                calls, kernels = [round(us, 1) for us, _ in ended], [f"{us:.1f}" for us in ended[0][1]]
                print(problem.brief(), programs, calls, kernels, flush=True)


if __name__ == "__main__":
    main()
