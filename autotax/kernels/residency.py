"""Launches whose programs all run at the same time, so that they may wait for each other."""

from __future__ import annotations

from typing import Any

import triton

from autotax.kernels.context import Context

try:
    from triton.language.extra.cuda import gdc_wait
except ModuleNotFoundError:  # Triton built only for ROCm: launches never overlap there, so this is never called

    @triton.jit
    def gdc_wait():
        pass


def all_resident(context: Context) -> dict[str, Any]:
    """Returns the options of such a launch. The driver refuses it unless all programs fit. From Hopper on, the launch
    may begin while the previous kernel is ending.
    """
    if context.interpreted:
        return {}
    overlapping = {} if context.target == "hip" else {"launch_pdl": context.hardware.launches_overlap}
    return {"launch_cooperative_grid": True} | overlapping


def threads_of(context: Context, warps: int) -> int:
    """Threads of a program with `warps` warps; a warp is a wave of 64 threads on AMD."""
    return warps * (64 if context.target == "hip" else 32)
