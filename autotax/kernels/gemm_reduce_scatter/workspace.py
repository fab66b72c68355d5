"""The host side that the fused variants share: memory in the heap, flags, and the constants of their kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.gemm import TileOptions
from autotax.kernels.context import Context
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

PIECE_ELEMENTS = 4096
"""Elements of a piece that a program adds up at a time."""
SUM_COLUMNS = 256


class Workspace:
    """The memory and constants of the kernels for a problem, or for one with fewer rows. Construction is collective."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.tiles = TileOptions.of(config)
        world, self.room = problem.world_size, problem.shard_rows
        tiles, replicated = self.tiles, problem.output == "replicated"
        dtype = context.dtype(problem)
        wire = torch.float32 if config["payload"] == "fp32" else dtype
        blocks = ceil_div(self.room, tiles.block_m)
        count = world * blocks * ceil_div(ceil_div(problem.n, tiles.block_n), config["flag_tiles"])
        self.box = context.heap.alloc((2, world, self.room, problem.n), wire)
        self.sums = context.heap.alloc((2, world, self.room, problem.n) if replicated else (8,), dtype)
        self.flags, self.sum_flags = context.flags(count), context.flags(world * blocks)
        self.counts, self.told = (context.empty((count,), torch.int32).zero_() for _ in range(2))
        self.sum_counts, self.sum_told = (context.empty((blocks,), torch.int32).zero_() for _ in range(2))
        splits = config["splits"]
        cut = 0 if splits == 1 else context.processors - 1
        self.partials = context.empty((max(1, cut * splits), tiles.block_m, tiles.block_n), torch.float32)
        self.finished = context.empty((max(1, cut),), torch.int32).zero_()
        cols = min(tiles.block_n, SUM_COLUMNS)
        self.constants: dict[str, Any] = {
            "WORLD": world,
            "REPLICATED": replicated,
            "KN": problem.weight == "kn",
            "ADDERS": config["adders"],
            "LATE": config["signals"] == "late",
            "FLAT": config["flat"] == 1,
            "TILES": config["flag_tiles"],
            "ROWS": min(tiles.block_m, PIECE_ELEMENTS // cols),
            "COLS": cols,
            "ALIGNED_K": math.gcd(problem.k, 16),
            "ALIGNED_N": math.gcd(problem.n, 16),
            **tiles.constants,
        }

    def tensors(self) -> list[Tensor]:
        """The arguments of a kernel, in the order of `push_kernel`."""
        return [
            self.box, self.sums, self.partials, self.finished, self.counts, self.told, self.sum_counts, self.sum_told,
            self.flags, self.sum_flags,
        ]  # fmt: skip

    def view_of_b(self, b: Tensor) -> Any:
        """Returns the argument of `load_tile` for blocks of B: a TMA descriptor, or the tensor itself."""
        if not self.constants["KN"]:
            return self.tiles.view_b(b)
        return TensorDescriptor.from_tensor(b, [self.tiles.block_k, self.tiles.block_n]) if self.tiles.tma else b
