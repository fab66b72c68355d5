"""Registers and local memory that `autotax compile` tells from binaries, against what the driver says once it has loaded them.

    PYTHONPATH=. python results/h200x1/resources.py
"""

from random import Random
from typing import Any

import torch

from autotax import AllGatherGemm, FlashDecode
from autotax.kernels.context import Context
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.kernels.resources import resources_of
from autotax.problem import Problem
from autotax.spaces import space_for

PROBLEMS: list[Problem] = [
    AllGatherGemm(512, 7168, 8192, "bf16", "m", 4),
    AllGatherGemm(2048, 1536, 4096, "bf16", "m", 4),
    FlashDecode(1, 64, 8, 128, 32768, "bf16", 4),
    FlashDecode(32, 64, 8, 128, 8192, "bf16", 4),
]


def main() -> None:
    hardware = known_hardware("cuda:90")
    binaries = []

    class Keeping(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binaries.append((kernel.__name__, kernel.warmup(*args, TARGET=self.target, grid=grid, **options)))

    for problem in PROBLEMS:
        for variant in space_for(problem, hardware).variants.values():
            for config in variant.some(3, Random(1)):
                compile_offline(problem, config, hardware, Keeping)
    torch.zeros(1, device="cuda")
    same = spilled = 0
    for name, binary in binaries:
        told = resources_of(name, binary)
        binary._init_handles()
        ok = (told.registers, told.local) == (binary.n_regs, 4 * binary.n_spills)
        same += ok
        spilled += bool(told.local)
        if not ok:
            print("differs:", told, binary.n_regs, binary.n_spills)
    print(f"{same} of {len(binaries)} kernels: registers and local memory as the driver has them; {spilled} with local memory")


if __name__ == "__main__":
    main()
