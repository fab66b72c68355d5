"""push_specialized: like `push`, but warp-specialized (see `warps`). In every program some warps load, some multiply,
one sends, one polls, some add.

Waits: loaders and multiplying groups wait for each other, and a sender waits for the groups of its program. None of
them waits for another program. Pollers wait for the senders of all ranks, adders for their poller. So every wait
ends.

The inbox has two slots, chosen by the parity of the call. A rank writes a slot again two calls later. In the call in
between it waited for tiles of every peer. Each peer sent them after it had added up the previous call.

Each flag has one writer. The writer sets it to the number of the call, so calls of fewer rows may skip flags.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.roles import layout_of, padded
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.addends import Adding, addends
from autotax.kernels.gemm_reduce_scatter.warps import scatter_tiles
from autotax.kernels.primitives import EPOCH, leave
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS, MOST_RANKS, PART_ROWS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

MOST_REGISTERS = {1: 168, 2: 128}
"""Registers per thread at the launch, by the number of multiplying groups. It is all that a processor has, divided
over all warps. The kernel then redistributes them among the warps.
"""


@gluon.jit(do_not_specialize=["rank", "added"])
def push_specialized_kernel(
    a, b, box0, box1, box2, box3, box4, box5, box6, box7, out, bias, residual, added, box, flags, bases, control,
    rank, rows, cols, room, n, m,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    scatter_tiles(
        a, b, (box0, box1, box2, box3, box4, box5, box6, box7), out, bias, residual, added, box, flags, bases, control,
        rank, epoch, rows, cols, room, n, m,
        WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushSpecialized(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, n, self.room = problem.world_size, problem.n, problem.shard_rows
        high, across = config["block_m"], config["block_n"]
        wide = min(across, PART_ROWS)
        self.box = context.heap.alloc((2, world, self.room, n), context.dtype(problem))
        self.flags = context.flags(ceil_div(self.room, high) * ceil_div(n, across) * world)
        inboxes = [context.heap.peer(self.box, (context.rank + hop) % world) for hop in range(world)]
        views = [self.view(inbox.view(2 * world, self.room, n), [1, GROUP_ROWS, wide]) for inbox in inboxes]
        self.boxes = padded(views, MOST_RANKS, None)
        self.wide = wide
        self.constants = {
            "WORLD": world,
            "INTERLEAVED": config["order"] == "interleaved",
            "GROUP_M": config["group_m"],
            "GROUPS": high // GROUP_ROWS,
            "PARTS": across // wide,
            "WIDE": wide,
            "STAGES": config["num_stages"],
            "num_warps": 4,
            "maxnreg": MOST_REGISTERS[high // GROUP_ROWS],
        }

    def view(self, tensor: Tensor, box: list[int]) -> Any:
        """A TMA descriptor of boxes of a tensor."""
        return TensorDescriptor.from_tensor(tensor, box, layout_of(tuple(box), self.problem.dtype))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context = self.problem, self.context
        context.launch(
            push_specialized_kernel,
            (context.processors,),
            self.view(a, [GROUP_ROWS, BLOCK_K]), self.view(b, [self.wide, BLOCK_K]), *self.boxes,
            out, *addends(out, bias, residual), self.box, self.flags, context.heap.bases, self.control,
            context.rank, problem.shard_rows, problem.k, self.room, problem.n, problem.m,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Supports any number of rows: slots and flags keep the places they have for the most rows, and a flag is set
        to the number of the call.
        """
        return {}
