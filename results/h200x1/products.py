"""Products of e4m3 on one GPU, each verified and measured in place as `bsp` of one rank, which gathers nothing:

    PYTHONPATH=. python results/h200x1/products.py 100 > results/h200x1/products.txt

The number is a limit in seconds; what is left out is printed. Each kind of product has its first seeds.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

from autotax.api import ranks
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.hardware import Hardware, detect
from autotax.kernels.tiling import ROLES
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.runner.measurement import Candidate, Effort
from autotax.spaces import scaled

SIZES = [(5120, 12800), (8192, 4096), (8192, 14336), (18432, 7168), (7168, 8192), (5120, 4096)]
ROWS = (64, 128, 16, 256, 1, 32)
EFFORT = Effort(samples=12, seconds=0.12, fewest=6)
MOST = {"library": 1, "Triton": 5, "roles": 5}
"""Configs of each kind."""


def kind(config: Config) -> str:
    name = str(config["product"])
    return "library" if name == scaled.LIBRARY else "roles" if name.startswith(ROLES) else "Triton"


def configs_of(problem: AllGatherGemm, hardware: Hardware) -> Iterator[Config]:
    chosen = [Config.of("bsp", choice) for choice in scaled.choices(problem, problem.m, hardware, roles=True)]
    for name, most in MOST.items():
        yield from [config for config in chosen if kind(config) == name][:most]


def main() -> None:
    end, hardware, conditions = time.monotonic() + float(sys.argv[1]), detect(), Conditions.usual(True)
    problems = [
        AllGatherGemm(m, n, k, "e4m3", world_size=1, scales=scales)
        for m, (n, k), scales in itertools.product(ROWS, SIZES, ("row", "block"))
    ]
    with ranks(hardware, 1) as runner:
        for number, problem in enumerate(problems):
            if time.monotonic() > end:
                print(f"left out: {len(problems) - number}")
                break
            for near in problems[number : number + 3]:
                runner.expect(near, list(configs_of(near, hardware)))
            rows = runner.measure(problem, [Candidate(config, conditions) for config in configs_of(problem, hardware)], EFFORT)
            parts = [f"{row.config}: {row.error}" for row in rows if not row.verified]
            for name in MOST:
                right = [row for row in rows if row.verified and row.latency_us and kind(row.config) == name]
                if right:
                    best = min(right, key=lambda row: row.latency_us or 0.0)
                    parts.append(f"{name} {best.latency_us:.1f} ({best.config['product']}, {best.config['splits']})")
            print(f"{problem.m} x {problem.n} x {problem.k}, {problem.scales}:", "  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
