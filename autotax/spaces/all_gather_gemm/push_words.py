"""Search space of `push_words`: few rows, all sent as LL words."""

from __future__ import annotations

import itertools

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.kernels.tiling import K_ALIGNMENT, TILES_BY_WORDS, parts_of, sides
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.push_specialized import BARRIER_BYTES, have_roles, time_of

VARIANT = "push_words"
MOST_ROWS = 256
"""Most rows of all shards together. At 256 `push_specialized` is already faster: 3 MB of words take 10 us. Measured on two H200
that sent as much as four do.
"""
BLOCKS_K = (64, 128)
LOW = 32
"""Most rows of a tile whose products take little time compared with a barrier per 64 columns. Measured on two H200 that sent as
much as four do.
"""
STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
USUAL_COLUMNS = 768
"""Columns of B to prefetch; more delays the LL words. Measured on two H200 that sent as much as four do."""
K_GROUPS = (1, 2, 4, 8)
USUAL_K_GROUPS = (4, 2, 1)


def shared_bytes(block_m: int, block_n: int, block_k: int, stages: int) -> int:
    """Lower bound of the kernel's shared memory: operand buffers, staged output, barriers."""
    x, y = sides(block_m, block_n)
    return 2 * (stages * (x + y) * block_k + x * parts_of(y)[0]) + BARRIER_BYTES


def _divides(problem: AllGatherGemm, groups: int) -> bool:
    return groups == 1 or problem.shard_cols % (groups * K_ALIGNMENT) == 0


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace | None:
    """The space of the variant, or None where it does not apply or does not help."""
    if problem.m > MOST_ROWS or not have_roles(problem, hardware):
        return None
    blocks = [block for block in TILES_BY_WORDS if block // 2 < problem.m] or [min(TILES_BY_WORDS)]
    tiles = [(m, n) for m in blocks for n in TILES_BY_WORDS[m]]
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": tuple(blocks),
        "block_n": tuple(sorted({n for _, n in tiles})),
        "block_k": BLOCKS_K,
        "num_stages": STAGES,
        "k_groups": tuple(groups for groups in K_GROUPS if _divides(problem, groups)),
    }
    constraints = (
        Constraint(("block_m", "block_n"), lambda m, n: (m, n) in tiles, "no one or two groups of warps share out such a tile"),
        Constraint(
            ("block_m", "block_n", "block_k", "num_stages"),
            lambda m, n, k, stages: (m, n) not in tiles or shared_bytes(m, n, k, stages) <= hardware.shared_memory,
            "the pipeline does not fit in shared memory",
        ),
    )
    return VariantSpace(VARIANT, parameters, constraints, _seeds(problem, hardware, tiles))


def _seeds(problem: AllGatherGemm, hardware: Hardware, tiles: list[tuple[int, int]]) -> tuple[Config, ...]:
    """Tiles sorted by estimated time, with as many stages as fit, up to USUAL_COLUMNS of B."""
    order = sorted(tiles, key=lambda tile: (time_of(problem, hardware.processors, *tile), tile))
    groups = [each for each in USUAL_K_GROUPS if _divides(problem, each)]
    values = []
    for (m, n), number in [*itertools.product(order[:1], groups), *itertools.product(order[1:3], groups[:1])]:
        k = BLOCKS_K[m <= LOW]
        usual = [stages for stages in STAGES if stages * k <= USUAL_COLUMNS]
        most = max(stages for stages in usual if shared_bytes(m, n, k, stages) <= hardware.shared_memory)
        values.append({"block_m": m, "block_n": n, "block_k": k, "num_stages": most, "k_groups": number})
    return tuple(Config.of(VARIANT, value) for value in values)
