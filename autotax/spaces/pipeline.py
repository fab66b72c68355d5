"""What a software pipeline takes of a processor, by which spaces refuse what cannot fit."""

from __future__ import annotations

from autotax.hardware import Hardware


def blocks_held(hardware: Hardware, stages: int) -> int:
    """Blocks of operands in shared memory at a time; on ROCm one fewer than stages, for the next is on its way in registers."""
    return stages - 1 if hardware.backend == "rocm" else stages


def lanes(hardware: Hardware) -> int:
    """Threads of a warp (a wavefront on ROCm), each with registers of its own."""
    return 64 if hardware.backend == "rocm" else 32
