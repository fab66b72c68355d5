"""The error of All-Gather + GEMM of e4m3 whose terms are all positive, where tensor cores cut off the most, on two GPUs:

    PYTHONPATH=. python -m results.precision.one_sign

A row a size of K, a column a way to add up. A figure is the relative error of the whole C in bf16 (its limit is 5e-3).
"""

from __future__ import annotations

from autotax.core.config import Config
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance.calls import error_of_one_sign

WORLD = 2
SIZES = (1024, 4096, 8192, 16384)
LIBRARY = {"product": "library", "splits": 1}


def ways(problem: AllGatherGemm) -> dict[str, Config]:
    """Configs by what they add up in tensor cores."""
    tile = {"block_m": 128, "block_n": 128, "num_stages": 4}
    values = space_for(problem, detect()).default("scaled_specialized").values | tile
    ours = {f"{strip} columns": Config.of("scaled_specialized", values | {"strip": strip}) for strip in (128, 256)}
    return ours | {"library": Config.of("bsp", LIBRARY), "library, fast accumulation": Config("nccl_fast")}


def main() -> None:
    print(detect().device)
    with Ranks(WORLD, detect().backend) as ranks:
        for number, k in enumerate(SIZES):
            problem = AllGatherGemm(256, 1024, k, "e4m3", "m", WORLD, scales="row")
            if not number:
                print(f"| k | {' | '.join(ways(problem))} |\n|---|{'---|' * len(ways(problem))}")
            errors = [max(ranks.run(error_of_one_sign, problem, config, timeout=60)) for config in ways(problem).values()]
            print(f"| {k} | {' | '.join(f'{error:.1e}' for error in errors)} |", flush=True)


if __name__ == "__main__":
    main()
