"""The host side of the shared GEMM: its compile-time constants and the views of its operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.context import Context
from autotax.operators.all_gather_gemm import AllGatherGemm

AMD_OPTIONS = ("matrix_instr_nonkdim", "waves_per_eu", "kpack")
"""Compile options that only Triton for AMD knows."""


@dataclass(frozen=True)
class TileOptions:
    block_m: int
    block_n: int
    block_k: int
    tma: bool
    constants: dict[str, Any]
    """Constexprs and compile options of a kernel that calls `gather_gemm`."""

    @classmethod
    def of(cls, config: Config) -> TileOptions:
        tma = config["loads"] == "tma"
        constants = {
            "INTERLEAVED": config.values.get("order") == "interleaved",
            "GROUP_M": config["group_m"],
            "SPLITS": config.values.get("splits", 1),
            "BLOCK_M": config["block_m"],
            "BLOCK_N": config["block_n"],
            "BLOCK_K": config["block_k"],
            "TMA": tma,
            "num_warps": config["num_warps"],
            "num_stages": config["num_stages"],
        } | {name: config[name] for name in AMD_OPTIONS if name in config.values}
        return cls(config["block_m"], config["block_n"], config["block_k"], tma, constants)

    def parts(self, problem: AllGatherGemm, config: Config, context: Context) -> tuple[Tensor, Tensor]:
        """Allocates `partials` and `finished` of `gather_gemm`, for this many rows or fewer."""
        splits = config["splits"]
        cut = 0 if splits == 1 else min(context.processors - 1, ceil_div(problem.n, self.block_n) * self._rows_of_tiles(problem, config))
        partials = context.empty((max(1, cut * splits), self.block_m, self.block_n), torch.float32)
        return partials, context.empty((max(1, cut),), torch.int32).zero_()

    def _rows_of_tiles(self, problem: AllGatherGemm, config: Config) -> int:
        if problem.shard == "k":
            return ceil_div(problem.m, self.block_m)
        if config.values.get("across"):
            return ceil_div(problem.world_size * problem.shard_rows, self.block_m)
        return problem.world_size * ceil_div(problem.shard_rows, self.block_m)

    def view_a(self, matrix: Tensor) -> Any:
        """Returns the argument of `load_tile` for blocks of A: a TMA descriptor, or the tensor itself."""
        return TensorDescriptor.from_tensor(matrix, [self.block_m, self.block_k]) if self.tma else matrix

    def view_b(self, matrix: Tensor) -> Any:
        """Returns the argument of `load_tile` for blocks of B."""
        return TensorDescriptor.from_tensor(matrix, [self.block_n, self.block_k]) if self.tma else matrix


def element_alignment(problem: AllGatherGemm) -> int:
    """Every row of a shard is aligned to this many elements, at most 16. Vector accesses rely on it."""
    return math.gcd(problem.shard_cols, 16)
