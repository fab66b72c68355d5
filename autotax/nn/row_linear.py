"""The row-parallel linear layers: the products of all ranks are added up while they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.heap.collective_errors import together
from autotax.nn.bucketed_linear import SizedLinear
from autotax.nn.fallback import PlainRowLinear
from autotax.nn.linear_base import Call
from autotax.nn.tensor_checks import aligned, recorded
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
        prove: bool | float = False,
    ) -> None:
        super().__init__(weight, group, max_m, bias, layout, db, conditions, config, backward_config, sizes, like, check, prove)

    def forward(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return super().forward(x, out)
        if is_compiling():
            return self._traced(x, out, residual)
        first = self._like[0] if self._like else self
        return first.run(x, self.weight, out, self.bias, residual)

    def _traced(self, x: Tensor, out: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """See WeightedModule._traced."""
        weight, bias = self.weight, self.bias
        if torch.is_grad_enabled() and recorded(x, weight, out, bias, residual):
            return self._record(x, weight, out, bias, residual)
        make, write = self.OPERATORS
        if out is None:
            y: Tensor = make(x, weight, self.handle, bias, residual)
            return y
        write(x, weight, out, self.handle, bias, residual)
        return out

    def _call_and_add(
        self, call: Call, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> None:
        """See WeightedModule._call_and_add. Who stores the sum adds both."""
        call(x, weight, out, aligned(bias), residual)

    def _choose(self, rows: int) -> Call:
        """See WeightedModule._choose. What a plugin brings may leave the adding to its caller."""
        call = super()._choose(rows)
        return call if call is self._plain or getattr(call, "ADDS", False) else adding_behind(call)

    def _operators(self, wanted: list[tuple[Problem, Config]], hardware: Hardware, notes: list[str]) -> list[Any]:
        """See Module._operators. What adds is compiled for that too: a rank must not compile while its peers wait for it."""
        found = super()._operators(wanted, hardware, notes)
        for kernel in found:
            if getattr(kernel, "ADDS", False):
                assert self._world is not None
                what = f"compile {kernel.config} for {kernel.problem.key}, with bias and residual"
                with together(self._world, what), kernel.context.rehearsal():
                    for smaller, (x, weight, out) in self._rehearsals(kernel.problem):
                        fit = kernel.fitted(smaller)
                        if fit:
                            fit(x, weight, out, out.new_empty(out.shape[-1:]), torch.empty_like(out))
        return found

    # What SizedLinear asks for.

    def _problem_of(self, m: int, n: int, k: int, dtype: str, ranks: int) -> GemmReduceScatter:
        return GemmReduceScatter(m, n, k, dtype, self.OUTPUT, ranks, self._layout)

    def _rows_of(self, problem: GemmReduceScatter) -> tuple[int, int]:
        return problem.m, problem.out_rows

    def _m(self, rows: int) -> int:
        return rows

    def _bulk_synchronous(self, rows: int, weight: Tensor) -> PlainRowLinear:
        return PlainRowLinear(self._world, rows, weight, turned=self._layout == "kn", replicated=self.OUTPUT == "replicated")

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

    Kernels add bias and residual in float32 where they store the sum. Bulk-synchronous calls add them to the rounded sum, by a
    kernel of their own each.
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

    def _recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See SizedLinear._recorded."""
        y: Tensor = torch.ops.autotax.linear_reduce_scatter_recorded(x, weight, self.handle, bias, residual)
        return y

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

    def _recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See SizedLinear._recorded."""
        y: Tensor = torch.ops.autotax.linear_all_reduce_recorded(x, weight, self.handle, bias, residual)
        return y

    def _other(self, weight: Tensor, **more: Any) -> None:
        """See SizedLinear._other."""


def adding_behind(call: Call) -> Call:
    """A call that adds bias and residual to what it has stored."""

    def run(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        call(x, weight, out)
        for added in (bias, residual):
            if added is not None:
                out.add_(added)

    return run
