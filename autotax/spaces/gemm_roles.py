"""Parts of the spaces of both GEMM operators whose warps have roles: conditions, shared memory, and the time of tiles."""

from __future__ import annotations

from collections.abc import Callable

from autotax.core.problem import ceil_div
from autotax.hardware import Hardware
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS, MOST_RANKS, PART_ROWS, parts_of, sides, staged_columns
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

STAGES = (2, 3, 4, 5, 6, 7, 8)
BARRIER_BYTES = 1024
"""Shared memory for the barriers of 32 K groups and eight stages."""
STALLS = 1.12
"""Time of a tile's main loop over the time of its matrix products alone. Measured on one H200."""
BYTES = 60
"""Bytes per cycle that a processor loads at best. Measured on one H200."""
CYCLES_OF_A_TILE = 6000
"""Cycles of a tile's first load and last store, which nothing hides. Measured on one H200."""


def have_roles(problem: AllGatherGemm | GemmReduceScatter, hardware: Hardware) -> bool:
    """Whether warps with roles multiply such matrices: they need Hopper's instructions, and TMA for all matrices."""
    aligned = problem.item_size == 2 and problem.k % 8 == 0 and problem.n % 8 == 0 and problem.weight == "nk"
    return aligned and hardware.target == "cuda:90" and problem.world_size <= MOST_RANKS


def shared_bytes(
    block_m: int, block_n: int, stages: int, boxes: int = 0, block_k: int = BLOCK_K, staged: int = PART_ROWS
) -> int:
    """Lower bound of a kernel's shared memory: operand buffers, staged output of at most so many columns, boxes, barriers."""
    x, y = sides(block_m, block_n)
    elements = stages * (x + y) * block_k + x * min(parts_of(y)[0], staged) + boxes * GROUP_ROWS * BLOCK_K
    return 2 * elements + BARRIER_BYTES


Fits = Callable[[Hardware, int, int, int, int], bool]
"""Whether the shared memory of a GPU has room for a tile of so many rows and columns, with so many stages and boxes."""


def fits(hardware: Hardware, block_m: int, block_n: int, stages: int, boxes: int = 0, block_k: int = BLOCK_K) -> bool:
    return shared_bytes(block_m, block_n, stages, boxes, block_k) <= hardware.shared_memory


def codes_fit(hardware: Hardware, block_m: int, block_n: int, stages: int, boxes: int = 0) -> bool:
    """`fits` for words of two codes, whose widest tiles may stage less."""
    staged = staged_columns(block_n, stages)
    return shared_bytes(block_m, block_n, stages, boxes, staged=staged) <= hardware.shared_memory


def most_stages(hardware: Hardware, block_m: int, block_n: int, boxes: int = 0, fits: Fits = fits) -> int:
    return max(stages for stages in STAGES if fits(hardware, block_m, block_n, stages, boxes))


def time_of(problem: AllGatherGemm, processors: int, block_m: int, block_n: int) -> float:
    """Estimated cycles of a call, in whole waves of tiles, bound by either the matrix products or the loads."""
    waves = ceil_div(ceil_div(problem.m, block_m) * ceil_div(problem.n, block_n), processors)
    x, y = sides(block_m, block_n)
    # Each instruction multiplies 64 x part x 16: 2048 multiplications a cycle, 128 bytes a cycle from shared memory.
    products = x // GROUP_ROWS * sum(max(part / 2, 16 + part / 4) for part in parts_of(y)) / 16
    return waves * (problem.k * max(products * STALLS, (x + y) * problem.item_size / BYTES) + CYCLES_OF_A_TILE)
