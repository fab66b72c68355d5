"""Squares of a causal sequence of 128 K tokens, verified and measured in place as `bsp` of one rank, which gathers nothing:

    PYTHONPATH=. python results/h200x1/squares.py > results/h200x1/squares.txt

A line is the seconds so far, the problem, and for each config whether it was verified, its microseconds and its error.
"""

from __future__ import annotations

import time

from autotax.api import ranks
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.hardware import detect
from autotax.operators.gather_attention import GatherAttention
from autotax.runner.measurement import Candidate, Effort

EFFORT = Effort(samples=6, seconds=1.5, fewest=3)
HEADS = ((8, 8), (16, 4), (32, 4))
"""Query heads and KV heads."""


def main() -> None:
    begin, conditions = time.time(), Conditions.usual(True)
    with ranks(detect(), 1) as runner:
        for q_heads, kv_heads in HEADS:
            problem = GatherAttention(1, q_heads, kv_heads, 128, 131072, world_size=1)
            configs = [Config.of("bsp", library="cudnn", squares=rows) for rows in (1, 2, 4)]
            measured = runner.measure(problem, [Candidate(config, conditions) for config in configs], EFFORT)
            print(
                round(time.time() - begin),
                problem,
                [(str(row.config), row.verified, row.latency_us, str(row.error)[:100]) for row in measured],
                flush=True,
            )


if __name__ == "__main__":
    main()
