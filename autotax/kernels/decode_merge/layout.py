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
from autotax.kernels.residency import all_resident
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


# The host side of `words` and `compact`: one launch whose programs all run at the same time.

class AtOnce(MergeKernel):
    """Programs that send first and wait then. Each has an epoch of its own, which it advances at its end."""

    KERNEL: Any
    memory: tuple[Tensor, ...]
    """In the heap: where words arrive, zeros at first, which are words of call 0 and thus of none."""

    def __init__(self, problem: DecodeMerge, config: Config, context: Context, chunk: int) -> None:
        """`chunk`: how many ranks' results are polled at a time."""
        super().__init__(problem, config, context)
        layout, parts = self.layout, config["parts"]
        blocks = layout.rows // layout.together * parts
        room = config["per_processor"] * context.processors
        # The interpreter runs programs in turn, and one must not wait before the last has sent.
        self.programs = 1 if context.interpreted else min(room, blocks)
        self.epochs = context.empty((self.programs,), self.control.dtype).fill_(1)
        early = context.hardware.launches_overlap
        self.how |= all_resident(context)
        self.constants = {"CHUNK": chunk, "PARTS": parts, "EARLY": early, "SHARE": layout.share, **layout.block}

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor, held: Held | None = None) -> None:
        context, layout = self.context, self.layout
        context.launch(
            self.KERNEL, (self.programs,),
            *self.own(o, lse, held), out, merged, *self.memory, context.heap.bases, self.control, self.epochs,
            context.rank, self.taken, layout.rows, layout.arriving,
            WORLD=self.problem.world_size, **self.constants, **self.how,
        )  # fmt: skip
