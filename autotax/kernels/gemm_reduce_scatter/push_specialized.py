"""push_specialized and scaled_specialized: warps of every program load, multiply, send, poll and add up. `scatter_roles` says how."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.roles import layout_of, padded
from autotax.kernels.all_gather_gemm.scaled_shards import CODES as CODE
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, addends
from autotax.kernels.gemm_reduce_scatter.scatter_roles import scatter_tiles
from autotax.kernels.primitives import EPOCH, leave
from autotax.kernels.scaled_roles import CODES, OVERLAPPING, await_launch
from autotax.kernels.tiling import GROUP_ROWS, MOST_RANKS, PART_ROWS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.inputs import DTYPES
from autotax.operators.scaled import plain

MOST_REGISTERS = {1: 168, 2: 128}
"""Registers per thread at the launch, by multiplying groups: all of a processor. The kernel redistributes them among warps."""
MOST_WITHOUT_ADDERS = 168
"""The same where no warps add up but those groups."""


@gluon.jit(do_not_specialize=["rank", "added"])
def push_specialized_kernel(
    a, b, box0, box1, box2, box3, box4, box5, box6, box7, out, bias, residual, added, box, flags, bases, control,
    rank, rows, cols, room, n, m,
    WORLD: gl.constexpr, EVERYWHERE: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, EPILOGUE: gl.constexpr,
    AHEAD: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    scatter_tiles(
        a, b, (box0, box1, box2, box3, box4, box5, box6, box7), None, out, bias, residual, added, box, flags, bases, control,
        rank, epoch, rows, cols, room, n, m,
        WORLD, EVERYWHERE, INTERLEAVED, GROUP_M, "none", EPILOGUE, AHEAD, GROUPS, PARTS, WIDE, STAGES, 1, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushSpecialized(Adding):
    EVERYWHERE = False
    """Whether all ranks add up all rows."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, n = problem.world_size, problem.n
        self.room = self.rows_of(problem)
        high, across = config["block_m"], config["block_n"]
        wide = min(across, PART_ROWS)
        self.box = context.heap.alloc((2, world, self.room, n), context.dtype(problem))
        self.flags = context.flags(ceil_div(self.room, high) * ceil_div(n, across) * world)
        inboxes = [context.heap.peer(self.box, (context.rank + hop) % world) for hop in range(world)]
        views = [self.view(inbox.view(2 * world, self.room, n), [1, GROUP_ROWS, wide]) for inbox in inboxes]
        self.boxes = padded(views, MOST_RANKS, None)
        self.wide, self.epilogue = wide, not self.EVERYWHERE and config["adds"] == "epilogue"
        self.constants = {
            "WORLD": world, "EVERYWHERE": self.EVERYWHERE, "INTERLEAVED": not self.EVERYWHERE and config["order"] == "interleaved",
            "GROUP_M": config["group_m"], "EPILOGUE": self.epilogue, "AHEAD": config["polls"] == "ahead",
            "GROUPS": high // GROUP_ROWS, "PARTS": across // wide, "WIDE": wide, "STAGES": config["num_stages"],
            "num_warps": 4, "maxnreg": MOST_WITHOUT_ADDERS if self.epilogue else MOST_REGISTERS[high // GROUP_ROWS],
        }  # fmt: skip

    def rows_of(self, problem: GemmReduceScatter) -> int:
        """Rows that this rank adds up."""
        return problem.m if self.EVERYWHERE else problem.shard_rows

    def place_of(self, out: Tensor) -> Any:
        """C as the kernel takes it: a view for the sender where the epilogue adds up this rank's tiles."""
        return self.view(out[None], [1, GROUP_ROWS, self.wide]) if self.epilogue else out

    def view(self, tensor: Tensor, box: list[int]) -> Any:
        """A TMA descriptor of boxes of a tensor."""
        return TensorDescriptor.from_tensor(tensor, box, layout_of(tuple(box), self.problem.dtype))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context = self.problem, self.context
        context.launch(
            push_specialized_kernel, (context.processors,),
            self.view(a, [GROUP_ROWS, tiling.BLOCK_K]), self.view(b, [self.wide, tiling.BLOCK_K]), *self.boxes,
            self.place_of(out), *addends(out, bias, residual), self.box, self.flags, context.heap.bases, self.control,
            context.rank, self.rows_of(problem), problem.k, self.room, problem.n, problem.m,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Supports any number of rows: slots and flags keep their places, and a flag is set to the number of the call."""
        return {}


@gluon.jit(do_not_specialize=["rank", "added"])
def scaled_specialized_kernel(
    a, b, box0, box1, box2, box3, box4, box5, box6, box7, out, bias, residual, added, box, flags, bases, control,
    scales_a, stride_m, stride_g, scales_b, rank, rows, cols, room, n, m,
    WORLD: gl.constexpr, EVERYWHERE: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, EPILOGUE: gl.constexpr,
    AHEAD: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    await_launch()
    epoch = gl.load(control + EPOCH)
    scatter_tiles(
        a, b, (box0, box1, box2, box3, box4, box5, box6, box7), (scales_a, stride_m, stride_g, scales_b), out, bias, residual, added,
        box, flags, bases, control, rank, epoch, rows, cols, room, n, m,
        WORLD, EVERYWHERE, INTERLEAVED, GROUP_M, SCALES, EPILOGUE, AHEAD, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class ScaledSpecialized(PushSpecialized):
    """`PushSpecialized` for e4m3; `scaled_roles` says how its groups multiply. Tensors of a call: see `scaled_sums.Scaled`."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.quantised, self.result = Quantiser(problem, problem.m, context), problem.result
        super().__init__(plain(problem), config, context)
        self.problem = problem
        self.constants = self.constants | {"SCALES": problem.scales, "STRIPS": config["strip"] // CODES.value} | OVERLAPPING

    def view(self, tensor: Tensor, box: list[int]) -> Any:
        """A TMA descriptor of boxes of a tensor of the type of C, or of codes as words of that type."""
        words = tensor.view(DTYPES[self.result]) if tensor.dtype == CODE else tensor
        return TensorDescriptor.from_tensor(words, box, layout_of(tuple(box), self.result))

    def __call__(self, a: Tensor, b: Tensor, *rest: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        of_a, scales_b, out = rest[:-2], rest[-2], rest[-1]
        problem, context = self.problem, self.context
        codes, scales = self.quantised(a, of_a[0] if of_a else None)
        strides = scales.stride() if scales.dim() == 2 else (0, 0)
        context.launch(
            scaled_specialized_kernel, (context.processors,),
            self.view(codes, [GROUP_ROWS, tiling.BLOCK_K]), self.view(b, [self.wide, tiling.BLOCK_K]), *self.boxes,
            self.place_of(out), *addends(out, bias, residual), self.box, self.flags, context.heap.bases, self.control,
            scales, *strides, scales_b,
            context.rank, self.rows_of(problem), problem.k // 2, self.room, problem.n, problem.m,
            **self.constants,
        )  # fmt: skip
