"""The row-parallel linear layers: the products of all ranks are added up while they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.errors import UsageError
from autotax.nn.module import NO_OUT
from autotax.nn.plain import PlainRowLinear
from autotax.nn.sized import SizedLinear
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


class RowLinear(SizedLinear):
    """What the two have in common."""

    OUTPUT: str

    def __init__(
        self,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        max_m: int = 8192,
        *,
        bias: Tensor | None = None,
        layout: str = "nk",
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        backward_config: Config | None = None,
        sizes: Sequence[int] | None = None,
        like: Any = None,
        check: bool | None = None,
    ) -> None:
        super().__init__(weight, group, max_m, bias, layout, db, conditions, config, backward_config, sizes, like, check)

    def forward(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return super().forward(x, out)
        if is_compiling():
            return super().forward(x, out) + residual if out is None else super().forward(x, out).add_(residual)
        if torch.is_grad_enabled() and out is not None and residual.requires_grad:
            raise UsageError(NO_OUT)
        first = self._like[0] if self._like else self
        first._ensure_ready()
        shape = first._result(x.shape)
        if residual.dtype is not first._dtype and torch.is_autocast_enabled(first._device.type):
            residual = residual.to(first._dtype)
        if residual.shape != shape or residual.dtype is not first._dtype or residual.device != first._device:
            given = f"{residual.dtype} {list(residual.shape)} on {residual.device}"
            wanted = f"{first._dtype} {list(shape)} on {first._device}"
            raise UsageError(f"residual is {given}; it must be {wanted}: give such a tensor")
        return super().forward(x, out).add_(residual)

    # What SizedLinear asks for.

    def _problem_of(self, m: int, n: int, k: int, dtype: str, ranks: int) -> GemmReduceScatter:
        return GemmReduceScatter(m, n, k, dtype, self.OUTPUT, ranks, self._layout)

    def _rows_of(self, problem: GemmReduceScatter) -> tuple[int, int]:
        return problem.m, problem.out_rows

    def _m(self, rows: int) -> int:
        return rows

    def _bulk_synchronous(self, rows: int, weight: Tensor) -> PlainRowLinear:
        return PlainRowLinear(
            self._world, rows, weight, turned=self._layout == "kn", replicated=self.OUTPUT == "replicated"
        )

    def _too_many(self, rows: int) -> str:
        return f"x has {rows} rows; it must have at most {self._most}: give fewer, or make the layer with a greater max_m"


class LinearReduceScatter(RowLinear):
    """y = the own rows of the sum over the ranks of x @ weight.T, + bias: x [M, ..., k] on each rank, to [M / ranks, ..., n].

    `layer(x)`; `layer(x, out)` has the result in `out`; `residual`, shaped like the result, is added to it. Rank r gets the r-th
    part of the first dimension, which the ranks must divide. Everything else, also arguments that are not told here, is as
    AllGatherLinear has it.

    - `weight` [n, k], or [k, n] with `layout="kn"`, which every variant reads without a copy: the own rows of the whole weight.
    - `bias` [n]: the whole one, the same on all ranks. Each adds it to its rows; its gradient is summed over the ranks.
    - `max_m`: the most rows of x. `sizes`: numbers of rows of x to prepare for, each a multiple of the world size.
    - `config`, `backward_config`: of GEMM + Reduce-Scatter, and of the backward for x, which is All-Gather + GEMM.

    Bias and residual are added to the rounded sum, by a kernel of their own each.
    """

    OUTPUT = "scattered"
    OPERATORS = (torch.ops.autotax.linear_reduce_scatter, torch.ops.autotax.linear_reduce_scatter_out)

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        """See SizedLinear.shape_of."""
        if x[0] % self.world_size:
            raise UsageError(
                f"x is {list(x)}; {self.world_size} ranks share the first dimension: "
                "give a multiple, padded with zeros if need be"
            )
        return x[0] // self.world_size, *x[1:-1], columns

    def _recorded(self, x: Tensor, weight: Tensor) -> Tensor:
        """See SizedLinear._recorded."""
        y: Tensor = torch.ops.autotax.linear_reduce_scatter_recorded(x, weight, self.handle)
        return y

    def _added(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """See SizedLinear._added."""
        if bias is None or not bias.requires_grad:
            return super()._added(y, bias)
        return y + torch.ops.autotax.shared_by_ranks(bias, self.handle)

    def _other(self, weight: Tensor, **more: Any) -> Any:
        """See SizedLinear._other."""
        from autotax.nn.linear import AllGatherLinear

        return AllGatherLinear(weight, **more)


class LinearAllReduce(RowLinear):
    """y = the sum over the ranks of x @ weight.T, + bias: x [m, ..., k] on each rank, to [m, ..., n] on all: what decoding needs.

    As LinearReduceScatter, but for any number of rows. The gradient of the result must be the same on all ranks, as it is where
    all compute the same loss from it. Then that of x needs no other rank, and that of bias and residual is the result's.
    """

    OUTPUT = "replicated"
    OPERATORS = (torch.ops.autotax.linear_all_reduce, torch.ops.autotax.linear_all_reduce_out)

    def _unit(self, ranks: int) -> int:  # noqa: ARG002
        return 1

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        """See SizedLinear.shape_of."""
        return *x[:-1], columns

    def _recorded(self, x: Tensor, weight: Tensor) -> Tensor:
        """See SizedLinear._recorded."""
        y: Tensor = torch.ops.autotax.linear_all_reduce_recorded(x, weight, self.handle)
        return y

    def _other(self, weight: Tensor, **more: Any) -> None:
        """See SizedLinear._other."""
