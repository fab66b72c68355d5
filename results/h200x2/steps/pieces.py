"""`decomposed` with the last shard in halves, beside `copy_engine` in chunks: each config verified, all in a round, two rounds.

PYTHONPATH=. python results/h200x2/steps/pieces.py 8192x1536x4096 ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from autotax import AllGatherGemm
from autotax.config import Config, Value
from autotax.hardware import Hardware, detect
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.spaces import space_for

TILE: dict[str, Value] = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3, "group_m": 8}
USUAL: dict[str, Value] = {"loads": "tma", "order": "ring", "streams": 1, "splits": 1}


def candidates(problem: AllGatherGemm, hardware: Hardware) -> Iterator[Config]:
    yield Config("bsp")
    for products in ("two", "halves"):
        yield Config.of("decomposed", products=products, comm=0, warm=0)
    for parts in (1, 2, 4):
        yield Config.of("copy_engine", TILE | USUAL, chunk_rows=problem.shard_rows // parts)
    yield space_for(problem, hardware).variants["push_specialized"].seeds[1]


def main() -> None:
    hardware = detect()
    runner = LiveRunner(hardware, 2)
    jobs: list[tuple[AllGatherGemm, list[Config]]] = []
    for m, n, k in (map(int, shape.split("x")) for shape in sys.argv[1:]):
        problem = AllGatherGemm(m, n, k, "bf16", "m", 2)
        jobs.append((problem, list(dict.fromkeys(candidates(problem, hardware)))))
        runner.expect(*jobs[-1])
    for problem, configs in jobs:
        print("==", problem.m, problem.n, problem.k, flush=True)
        for _ in range(2):
            for found in runner.measure(problem, [Candidate(config) for config in configs], Effort(samples=40, seconds=0.3)):
                told = f"{found.latency_us:8.2f}" if found.verified else f"{found.status} {found.error}"
                print("   ", told, found.config, flush=True)
    runner.close()


if __name__ == "__main__":
    main()
