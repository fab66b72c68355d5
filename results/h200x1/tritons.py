"""The same configs under several Tritons or from several checkouts, on one GPU: each is verified, those of a problem interleaved.

    PYTHONPATH=. python results/h200x1/tritons.py 3.6 >> tritons.jsonl      # once a Triton, in turn; 3.6 is what it is called
    python results/h200x1/tritons.py --table tritons.jsonl
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from autotax import AllGatherGemm, FlashDecode
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.spaces import space_for

GEMMS = [(512, 7168, 8192), (2048, 7168, 8192), (2048, 2560, 8192), (8192, 3584, 4096), (1024, 2560, 8192), (2048, 1536, 4096)]
PLAIN = ((128, 256, 8, 3), (128, 128, 4, 5), (128, 320, 8, 3))
ROLES = ((128, 224, 4), (128, 320, 3), (128, 160, 5), (128, 128, 5), (256, 192, 3))
DECODES = [(1, 2048), (1, 8192), (1, 32768), (8, 2048), (32, 2048), (64, 2048)]


def gemms(problem: AllGatherGemm) -> list[Config]:
    """cuBLAS, which no Triton changes, and both cores with some tiles; nothing is sent."""
    space = space_for(problem, detect())
    rows = space.variants["push"].parameters["chunk_rows"][-1]
    usual = space.default("push").values | {"block_k": 64, "comm": 1, "k_groups": 1, "splits": 1, "pieces": 1, "chunk_rows": rows}
    cases = [Config("product")]
    for m, n, warps, stages in PLAIN:
        cases += [Config.of("push", usual | {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": stages, "group_m": 8})]
    usual = space.default("push_specialized").values | {"k_groups": 1, "chunk_rows": rows, "group_m": 8}
    cases += [Config.of("push_specialized", usual | {"block_m": m, "block_n": n, "num_stages": stages}) for m, n, stages in ROLES]
    return [config for config in cases if config.variant == "product" or space.why_not(config) is None]


def decodes(problem: FlashDecode) -> list[Config]:
    """Of each variant the first seed of either core."""
    seeds = []
    for space in space_for(problem, detect()).variants.values():
        seeds += {config["attend"]: config for config in reversed(space.seeds)}.values()
    return seeds


def measure(label: str, only: str) -> None:
    runner = LiveRunner(detect(), 1)
    sets: dict[Problem, list[Config]] = {}
    for m, n, k in GEMMS:
        gemm = AllGatherGemm(m, n, k, "bf16", "m", 1)
        sets[gemm] = gemms(gemm)
    for batch, kv_len in DECODES:
        decode = FlashDecode(batch, 64, 8, 128, kv_len, "bf16", 1)
        sets[decode] = decodes(decode)
    sets = {problem: configs for problem, configs in sets.items() if problem.op.startswith(only)}
    for problem, configs in sets.items():
        runner.compilers.expect(problem, configs)
    for problem, configs in sets.items():
        measurements = runner.measure(problem, [Candidate(config) for config in configs], Effort(samples=60, seconds=0.25))
        for one in measurements:
            row = {"label": label, "problem": problem.key, "config": str(one.config), "status": one.status}
            print(json.dumps(row | {"us": one.latency_us, "error": one.error}), flush=True)
    runner.close()


def table(path: str) -> None:
    """Each config's figures of all runs, by label, and for each variant each label's medians over those of the first."""
    us: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Path(path).open() as lines:
        for row in map(json.loads, lines):
            if row["status"] != "ok":
                print("not ok:", row)
            else:
                us[row["problem"], row["config"]][row["label"]].append(row["us"])
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (problem, config), latencies in us.items():
        first, *others = latencies
        summary = "; ".join(f"{label} " + " ".join(f"{u:.2f}" for u in latencies[label]) for label in latencies)
        print(f"{problem} {config}: {summary}")
        for label in others:
            ratio = statistics.median(latencies[label]) / statistics.median(latencies[first])
            ratios[config.split("(")[0], label, first].append(ratio)
    for (variant, label, first), all_of in ratios.items():
        mean = statistics.geometric_mean(all_of)
        print(f"{variant}: {label} over {first}, geometric mean {mean:.3f}, {min(all_of):.3f} to {max(all_of):.3f}")


if __name__ == "__main__":
    table(sys.argv[2]) if sys.argv[1] == "--table" else measure(sys.argv[1], "".join(sys.argv[2:]))
