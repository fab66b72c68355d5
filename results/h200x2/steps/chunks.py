"""`copy_engine` with the shard in chunks, beside `decomposed` and `push_specialized`: each config verified, ten in a round.

PYTHONPATH=. python results/h200x2/steps/chunks.py 8192x1536x4096 ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from autotax import AllGatherGemm
from autotax.config import Config, Value
from autotax.hardware import Hardware, detect
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.spaces import space_for

TILES = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 5), (128, 320, 64, 8, 3))
NAMES = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
USUAL: dict[str, Value] = {"loads": "tma", "order": "ring", "streams": 1, "splits": 1}


def candidates(problem: AllGatherGemm, hardware: Hardware) -> Iterator[Config]:
    space, rows = space_for(problem, hardware), problem.shard_rows
    yield Config.of("decomposed", products="two", comm=0, warm=0)
    for tile in TILES:
        for parts, group in ((1, 8), (2, 8), (4, 8), (4, 1), (8, 8)):
            chosen = dict(zip(NAMES, tile, strict=True)) | USUAL | {"group_m": group, "chunk_rows": rows // parts}
            yield Config.of("copy_engine", chosen)
    usual = space.variants["push_specialized"].seeds[1]  # with two boxes, for two ranks
    for parts in (1, 4, 8):
        yield Config.of("push_specialized", usual.values | {"chunk_rows": max(64, rows // parts)})


def main() -> None:
    hardware = detect()
    runner = LiveRunner(hardware, 2)
    jobs: list[tuple[AllGatherGemm, list[Config]]] = []
    for m, n, k in (map(int, shape.split("x")) for shape in sys.argv[1:]):
        problem = AllGatherGemm(m, n, k, "bf16", "m", 2)
        space = space_for(problem, hardware)
        jobs.append((problem, [config for config in dict.fromkeys(candidates(problem, hardware)) if config in space]))
        runner.expect(*jobs[-1])
    for problem, configs in jobs:
        print("==", problem.m, problem.n, problem.k, len(configs), flush=True)
        for start in range(0, len(configs), 10):
            asked = [Candidate(config) for config in configs[start : start + 10]]
            for found in runner.measure(problem, asked, Effort(samples=40, seconds=0.3)):
                told = f"{found.latency_us:8.2f}" if found.verified else f"{found.status} {found.error}"
                print("   ", told, found.config, flush=True)
    runner.close()


if __name__ == "__main__":
    main()
