"""Search space of `push_specialized`: tiles made of whole warp groups, their order, and stages."""

from __future__ import annotations

import itertools

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.kernels.tiling import MOST_RANKS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces.all_gather_gemm.push_specialized import STAGES, shared_bytes, time_of
from autotax.spaces.all_gather_gemm.tiles import order_parameters
from autotax.spaces.gemm_reduce_scatter.tiles import gathered

VARIANT = "push_specialized"
BLOCKS_M, BLOCKS_N = (64, 128), (128, 256)
"""Rows for one or two warp groups, and columns for one or two parts."""


def have_roles(problem: GemmReduceScatter, hardware: Hardware) -> bool:
    """Whether the warp-specialized GEMM applies: it needs Hopper's instructions, and TMA for all matrices."""
    aligned = problem.item_size == 2 and problem.k % 8 == 0 and problem.n % 8 == 0
    known = problem.weight == "nk" and problem.output == "scattered"
    return aligned and known and hardware.target == "cuda:90" and problem.world_size <= MOST_RANKS


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Only for a scattered output of 16 bits and weights [n, k]; None elsewhere."""
    if not have_roles(problem, hardware):
        return None

    def fits(m: int, n: int, stages: int) -> bool:
        return shared_bytes(m, n, stages, boxes=0) <= hardware.shared_memory

    like = gathered(problem)
    orders = order_parameters(like)["order"]
    parameters: dict[str, tuple[Value, ...]] = {
        "block_m": BLOCKS_M,
        "block_n": BLOCKS_N,
        "num_stages": STAGES,
        "group_m": (1, 4, 8),
        "order": orders,
    }
    constraints = (Constraint(("block_m", "block_n", "num_stages"), fits, "the pipeline does not fit in shared memory"),)
    tiles = sorted(itertools.product(BLOCKS_M, BLOCKS_N), key=lambda tile: time_of(like, hardware.processors, *tile))
    seeds = [
        Config.of(
            VARIANT,
            block_m=m,
            block_n=n,
            num_stages=max(stages for stages in STAGES if fits(m, n, stages)),
            group_m=group,
            order=order,
        )
        for (m, n), group, order in itertools.product(tiles[:2], (8, 4), orders[::-1])
    ]
    return VariantSpace(VARIANT, parameters, constraints, tuple(seeds))
