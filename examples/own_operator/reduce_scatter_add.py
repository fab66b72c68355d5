"""Reduce-scatter + add: each rank gets its rows of the sum of all ranks' x, and adds a residual to them."""
# autotax tune reduce-scatter-add --m 4096 --n 8192 --load examples/own_operator/reduce_scatter_add.py
# Once it is installed (pip install ./examples/own_operator), every command knows the operator without --load.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import autotax.operators as op
from autotax.core.errors import UsageError


@dataclass(frozen=True)
class ReduceScatterAdd(op.Problem):
    """x [m, n] on each rank, residual [m / world_size, n] -> out [m / world_size, n]."""

    m: int = op.size("rows of x", varying=True)
    n: int = op.size("columns of x")
    dtype: str = op.dtype()
    world_size: int = op.ranks()

    op: ClassVar[str] = "reduce-scatter-add"

    def check(self) -> None:
        if self.m % self.world_size:
            raise UsageError(f"m is {self.m}; it must be a multiple of {self.world_size} ranks: give another --m")

    @property
    def rows(self) -> int:
        return self.m // self.world_size


operator = op.Operator(ReduceScatterAdd)
operator.example(on_gpu=ReduceScatterAdd(4096, 8192), on_cpu=ReduceScatterAdd(12, 40, "fp32"))
operator.variant("bsp", "reduce_scatter_add_kernels:Bsp", role="baseline")
operator.variant("push", "reduce_scatter_add_kernels:Push", "reduce_scatter_add:push_space")


@operator.inputs
def inputs(problem: ReduceScatterAdd, draw: op.Draw) -> op.Call:
    x, residual = draw.normal(problem.m, problem.n, tensor=1), draw.normal(problem.rows, problem.n, tensor=2)
    return op.Call((x, residual), draw.empty(problem.rows, problem.n))


@operator.reference
def reference(problem: ReduceScatterAdd, calls: Sequence[op.Call], rank: int) -> Any:
    own = slice(rank * problem.rows, (rank + 1) * problem.rows)
    return sum(call.tensors[0][own].float() for call in calls) + calls[rank].tensors[1].float()


def push_space(_: ReduceScatterAdd, hardware: Any) -> op.VariantSpace:
    programs = tuple(p for p in (1, 2, 8, 32, 64, 128) if p <= hardware.processors)
    first = op.Config.of("push", programs=programs[-1], block=1024)
    return op.VariantSpace("push", {"programs": programs, "block": (256, 1024, 4096)}, (), (first,))

