"""Resources that a software pipeline needs; spaces use them to reject configs that cannot fit."""

from __future__ import annotations

from autotax.hardware import Hardware


def blocks_held(hardware: Hardware, stages: int) -> int:
    """Blocks of operands in shared memory at a time.

    On ROCm one fewer than stages, because registers hold the next block. gfx950 copies it to shared memory itself, from Triton
    3.8 on.
    """
    return stages - 1 if hardware.backend == "rocm" and hardware.target != "hip:gfx950" else stages


def lanes(hardware: Hardware) -> int:
    """Threads of a warp, or of a wavefront on ROCm."""
    return 64 if hardware.backend == "rocm" else 32
