"""The GEMM cores alone: one GPU, world size 1, nothing to send, against cuBLAS; each config is verified before it is timed.

    python results/h200x1/core.py
"""

from autotax import AllGatherGemm
from autotax.core.config import Config
from autotax.hardware import detect
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.spaces import space_for

SHAPES = ((512, 7168, 8192), (1024, 7168, 8192), (2048, 7168, 8192), (8192, 7168, 8192), (2048, 2560, 8192), (8192, 2560, 8192))
SHAPES += ((8192, 3584, 4096), (1024, 2560, 8192))
PLAIN = ((128, 256, 8, 3), (128, 128, 4, 5), (128, 320, 8, 3))
ROLES = ((128, 256, 3), (128, 224, 4), (128, 320, 3), (128, 160, 5), (128, 192, 4), (128, 128, 5), (256, 192, 3))
PRODUCT = Config("product")


def configs(problem: AllGatherGemm) -> list[Config]:
    space = space_for(problem, detect())
    rows = space.variants["push"].parameters["chunk_rows"][-1]
    usual = space.default("push").values | {"block_k": 64, "comm": 1, "k_groups": 1, "splits": 1, "pieces": 1, "chunk_rows": rows}
    candidates = [
        Config.of("push", usual | {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": stages, "group_m": 8})
        for m, n, warps, stages in PLAIN
    ]
    usual = space.default("push_specialized").values | {"k_groups": 1, "chunk_rows": rows}
    for m, n, stages in ROLES:
        candidates += [
            Config.of("push_specialized", usual | {"block_m": m, "block_n": n, "num_stages": stages, "group_m": group})
            for group in (8, 4)
        ]
    return [config for config in candidates if space.why_not(config) is None]


def name(config: Config) -> str:
    kind = "roles" if config.variant == "push_specialized" else "plain"
    return f"{kind} {config['block_m']}x{config['block_n']} g{config['group_m']}"


def main() -> None:
    runner = LiveRunner(detect(), 1)
    problems = [AllGatherGemm(*shape, "bf16", "m", 1) for shape in SHAPES]
    for problem in problems:
        runner.compilers.expect(problem, configs(problem))
    for problem in problems:
        us = {}
        for config in (PRODUCT, *configs(problem)):
            (measurement,) = runner.measure(problem, [Candidate(config)], Effort(samples=10, seconds=0.04))
            if measurement.status == "ok":
                us[config] = measurement.latency_us
            else:
                print(f"   {name(config)}: {measurement.status} {measurement.error}")
        vendor = us.pop(PRODUCT)
        ranking = sorted(us, key=us.__getitem__)
        alone = ", ".join(f"{name(c)} {us[c]:.1f} {vendor / us[c]:.3f}" for c in ranking[:6])
        print(f"== {problem.m}x{problem.n}x{problem.k} alone: cublas {vendor:.1f}; {alone}")
        best = {(c.variant, c["block_m"], c["block_n"]): c for c in reversed(ranking)}
        shown = sorted(best.values(), key=us.__getitem__)[:4]
        first, *others = runner.measure(problem, [Candidate(c) for c in (PRODUCT, *shown)], Effort(samples=60, seconds=0.5))
        vendor = first.latency_us
        beside = ", ".join(f"{name(o.config)} {o.latency_us:.1f} {vendor / o.latency_us:.3f} ({o.status})" for o in others)
        print(f"   interleaved: cublas {vendor:.1f}; {beside}", flush=True)
    runner.close()


if __name__ == "__main__":
    main()
