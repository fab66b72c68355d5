"""The host side shared by the variants: how rows are dealt out, and what a kernel may be called for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.operators.decode_merge import DecodeMerge

Held = tuple[Tensor, Tensor]
"""How many tokens of each sequence this rank holds, int32 [sequences], and the first query token of each, int32 [sequences + 1]: see
`partials.holds_nothing`."""


@dataclass(frozen=True)
class Layout:
    rows: int
    """(query token, head) pairs of the problem."""
    arriving: int
    """Those of which a rank gets the output, and hence the partial result of every rank."""
    share: int
    """Heads that each rank owns, or 0 where every rank gets all."""
    together: int
    """Rows that a program handles together: neighbouring heads of one token, which go to the same ranks."""
    block: dict[str, Any]
    """Constexprs of a block of such rows."""

    @classmethod
    def of(cls, problem: DecodeMerge, config: Config) -> Layout:
        together, dim = config["rows"], problem.head_dim
        assert isinstance(together, int)
        block_d = max(16, power_of_two(dim))
        block = {"GROUP": together, "HEAD_DIM": dim, "BLOCK_G": power_of_two(together), "BLOCK_D": block_d}
        return cls(
            rows=problem.batch * problem.heads,
            arriving=problem.batch * problem.out_heads,
            share=problem.out_heads if problem.output == "head_scatter" else 0,
            together=together,
            block=block | {"BASE_E": problem.base == "e"},
        )


class MergeKernel(Kernel[DecodeMerge]):
    """A variant that is made for some query tokens and serves any fewer: memory and flags stay where they are."""

    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.layout = Layout.of(problem, config)
        self.how = {"num_warps": config["num_warps"]}

    def changes_for(self, smaller: DecodeMerge) -> dict[str, Any]:  # noqa: ARG002
        """Rows beyond those of the call are sent as empty ones, so that every flag is raised and every word has the call's tag."""
        return {}

    def own(self, o: Tensor, lse: Tensor, held: Held | None) -> tuple[Any, ...]:
        """What `load_partial` is told of the own result: O, LSE, what is held, the rows, the heads and the strides of LSE."""
        lens, starts = held or (None, None)
        heads, sequences = self.problem.heads, 0 if lens is None else len(lens)
        return o, lse, lens, starts, sequences, self.problem.batch * heads, heads, lse.stride(0), lse.stride(1)

    @property
    def taken(self) -> int:
        """Rows of the output of a call."""
        return self.problem.batch * self.problem.out_heads


def inbox_of(problem: DecodeMerge, layout: Layout, context: Context) -> tuple[Tensor, Tensor]:
    """Where results arrive that are followed by flags: o [2, world, arriving, head_dim], exactly as it is, and lse. Collective."""
    world, rows = problem.world_size, layout.arriving
    o = context.heap.alloc((2, world, rows, problem.head_dim), context.dtype(problem))
    return o, context.heap.alloc((2, world, rows), torch.float32)
