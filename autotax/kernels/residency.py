"""Launches whose programs all run at the same time, and may therefore wait for each other."""

from __future__ import annotations

from typing import Any

import triton

from autotax.kernels.context import Context

try:
    from triton.language.extra.cuda import gdc_wait
except ModuleNotFoundError:  # a Triton for ROCm alone, where no launch overlaps and nobody calls it

    @triton.jit
    def gdc_wait():
        pass


def all_resident(context: Context) -> dict[str, Any]:
    """Options of such a launch: the driver refuses it unless all programs fit. From Hopper on it begins while the kernel before it ends."""
    if context.interpreted:
        return {}
    overlapping = {} if context.target == "hip" else {"launch_pdl": context.hardware.launches_overlap}
    return {"launch_cooperative_grid": True} | overlapping


def threads_of(context: Context, warps: int) -> int:
    """Threads of a program; a warp is a wave of 64 on AMD."""
    return warps * (64 if context.target == "hip" else 32)
