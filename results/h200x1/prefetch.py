"""Flash Decode of one rank: `python results/h200x1/prefetch.py NAME` in a checkout, and in one with prefetch.patch applied."""

import sys

from autotax import FlashDecode
from autotax.hardware import detect
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.spaces import space_for


def main() -> None:
    runner = LiveRunner(detect(), 1)
    problems = [FlashDecode(1, 64, 8, 128, kv, "bf16", 1) for kv in (2048, 8192, 32768)]
    configs = {}
    for problem in problems:
        space = space_for(problem, detect())
        configs[problem] = [*space.variants["resident"].seeds[:3], space.default("compact")]
        runner.compilers.expect(problem, configs[problem])
    for problem in problems:
        found = runner.measure(problem, [Candidate(config) for config in configs[problem]], Effort(samples=60, seconds=0.3))
        told = [f"{f.config.variant} {f.config['splits']}x{f.config['block_s']} {f.status} {f.latency_us:.2f}" for f in found]
        print(sys.argv[1], problem.kv_len, "; ".join(told), flush=True)
    runner.close()


if __name__ == "__main__":
    main()
