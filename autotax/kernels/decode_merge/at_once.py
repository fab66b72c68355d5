"""The host side of `words` and `compact`: one launch whose programs all run at the same time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.decode_merge.layout import Held, MergeKernel
from autotax.kernels.residency import all_resident
from autotax.operators.decode_merge import DecodeMerge


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
