"""The two attention cores in whole calls, interleaved: what won on four GPUs, and warps with tokens of their own.

    PYTHONPATH=. python results/h200x2/steps/cores.py

Two ranks with half of the KV length of four, so that a rank has as much of the cache; what they exchange is less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotax import FlashDecode, problem_from_dict
from autotax.config import Config, Value
from autotax.hardware import detect
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.spaces import space_for

WINNERS = Path("autotax/shipped/h200x4.json")


def candidates(winner: Config) -> Iterator[Config]:
    """The winner, then with warps that have tokens of their own: tokens a block, warps, stages, and more programs or splits."""
    yield winner
    splits = int(winner["splits"])
    for tokens, warps, stages in ((64, 4, 3), (64, 4, 4), (128, 4, 3), (32, 2, 3), (32, 2, 4)):
        own: dict[str, Value] = {"attend": "by_warp", "block_s": tokens, "num_warps": warps, "num_stages": stages}
        yield Config.of(winner.variant, winner.values | own)
        yield Config.of(winner.variant, winner.values | own | {"per_processor": 2})
        if warps == 2:
            yield Config.of(winner.variant, winner.values | own | {"per_processor": 2, "splits": 2 * splits})
        else:
            yield Config.of(winner.variant, winner.values | own | {"per_processor": 1, "splits": max(1, splits // 2)})


def main() -> None:
    runner = LiveRunner(detect(), 2)
    document: dict[str, Any] = json.loads(WINNERS.read_text())
    todo: list[tuple[FlashDecode, list[Config]]] = []
    for winner in document["winners"]:
        four = problem_from_dict(winner["problem"])
        if not isinstance(four, FlashDecode):
            continue
        problem = replace(four, kv_len=four.kv_len // 2, world_size=2)
        space, best = space_for(problem, detect()), Config.from_dict(winner["config"])
        configs = list(dict.fromkeys(config for config in candidates(best) if config in space))
        assert runner.compilers is not None
        runner.compilers.expect(problem, configs)
        todo.append((problem, configs))
    for problem, configs in todo:
        print(f"== {problem}")
        for found in runner.measure(problem, [Candidate(config) for config in configs], Effort(samples=60, seconds=0.3)):
            print(f"   {found.latency_us:.2f}" if found.status == "ok" else f"   {found.error}", found.config, flush=True)
    runner.close()


if __name__ == "__main__":
    main()
