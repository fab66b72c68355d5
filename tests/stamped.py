"""Compiles variants of an operator for cuda:90, without and with stamps: python -m tests.stamped OPERATOR VARIANT ..."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from autotax.core.problem import Problem
from autotax.kernels.context import Context
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.operators.problems import AllGatherGemm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather
from autotax.runner.device_timestamps import Stamps, stamping
from autotax.runner.trace import is_stamped
from autotax.spaces import space_for

TARGET = known_hardware("cuda:90")
PROBLEMS: dict[str, Problem] = {
    problem.op: problem
    for problem in (
        AllGatherGemm(512, 7168, 8192, "bf16", "m", 2),
        GemmReduceScatter(512, 8192, 2560, "bf16", "scattered", 2),
        FlashDecode(1, 64, 8, 128, 32768, "bf16", 2),
        DecodeMerge(16, 128, 512, "bf16", 2, "head_scatter"),
        HeadGather(16, 128, 576, "bf16", 2),
    )
}


def compiled(problem: Problem, variants: list[str]) -> list[dict[str, Any]]:
    """For each kernel, how many stamps it has, and whether it was assembled."""
    kernels: list[dict[str, Any]] = []

    class Reading(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            stamps = binary.asm["ptx"].count("mov.b64 start, ")
            kernels.append({"kernel": kernel.__name__, "stamps": stamps, "assembled": bool(binary.asm.get("cubin"))})

    for variant in variants:
        compile_offline(problem, space_for(problem, TARGET).default(variant), TARGET, Reading)
    return kernels


def main(problem: Problem, variants: list[str]) -> None:
    variants = variants or list(space_for(problem, TARGET).variants)
    plain, stamps = compiled(problem, variants), Stamps(torch.device("cpu"), 16)
    with stamping(stamps, is_stamped):
        stamped = compiled(problem, variants)
    roles = {mark.function for mark in stamps.marks if mark.role}
    print(json.dumps([plain, stamped, sorted({mark.function for mark in stamps.marks} - roles), sorted(roles)]))


if __name__ == "__main__":
    main(PROBLEMS[sys.argv[1]], sys.argv[2:])
