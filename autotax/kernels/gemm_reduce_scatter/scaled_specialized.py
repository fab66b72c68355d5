"""scaled_specialized: `push_specialized` for e4m3. `scaled_roles` says how its groups multiply, `push_specialized` why waits end."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.roles import X_ROWS, allocate, layout_of
from autotax.kernels.all_gather_gemm.scaled_shards import CODES as CODE
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.addends import addends
from autotax.kernels.gemm_reduce_scatter.push_specialized import PushSpecialized
from autotax.kernels.gemm_reduce_scatter.scaled_sums import plain
from autotax.kernels.gemm_reduce_scatter.warps import add_tiles, load_tiles, poll_tiles, send_tiles, stage_part, tile_at
from autotax.kernels.primitives import EPOCH, leave
from autotax.kernels.scaled_roles import CODES, OVERLAPPING, await_launch, multiply_tile, with_scales
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.inputs import DTYPES


@gluon.jit
def multiply_scaled(
    GROUP: gl.constexpr, of_all, n, m, stagings, staged, drained, buffers, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """`warps.multiply_tiles` for codes. `of_all` are the scales of A and of B with the strides of the former."""
    scales_a, stride_m, stride_g, scales_b = of_all
    items, rank, rows, cols, m_tiles, n_tiles = share
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    groups = gl.cdiv(2 * cols, CODES)
    turn = 0
    sent = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        within = (block * GROUPS + GROUP) * X_ROWS + gl.arange(0, X_ROWS, layout=gl.SliceLayout(1, layout))
        row = (rank + hop) % WORLD * rows + within
        inside = (within < rows) & (row < m)
        of_a = scales_a + gl.where(inside, row, 0) * stride_m
        col = tile * (PARTS * WIDE)
        of_b = scales_b + col // CODES * groups
        last = gl.minimum((col + WIDE) // CODES, gl.cdiv(n, CODES) - 1)
        one, two, _, turn = multiply_tile(
            GROUP, buffers, cols, turn, of_a, stride_g, of_b, scales_b + last * groups,
            SCALES, False, GROUPS, WIDE, WIDE * (PARTS - 1), 0, STAGES, 1,
        )  # fmt: skip
        # Rows of padding lie in the next owner's rows, or are zeros that a NaN of B makes NaN.
        one = gl.where(inside[:, None], with_scales(one, of_a, inside, scales_b, col, n, SCALES, False), 0.0)
        stage_part(one, stagings.index(GROUP), staged.index(GROUP), drained.index(GROUP), sent, TARGET)
        if PARTS == 2:
            two = gl.where(inside[:, None], with_scales(two, of_a, inside, scales_b, col + WIDE, n, SCALES, False), 0.0)
            stage_part(two, stagings.index(GROUP), staged.index(GROUP), drained.index(GROUP), sent + 1, TARGET)
        sent += PARTS


@gluon.jit
def scatter_scaled(
    a, b, boxes, of_all, out, bias, residual, added, box, flags, bases, control, rank, epoch, rows, cols, room, n, m,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """`warps.scatter_tiles` for codes. `a` [m, cols] and `b` [n, cols] are TMA descriptors of words of two codes."""
    HIGH: gl.constexpr = GROUPS * X_ROWS
    m_tiles = gl.cdiv(rows, HIGH)
    n_tiles = gl.cdiv(n, PARTS * WIDE)
    buffers, stagings = allocate(a, boxes[0], 1, False, GROUPS, WIDE, WIDE * (PARTS - 1), 0, STAGES, 1)
    staged = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(staged.index(group), count=1)
        mbarrier.init(drained.index(group), count=1)
    mbarrier.init(there, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    share = (WORLD * m_tiles * n_tiles, rank, rows, cols, m_tiles, n_tiles)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_scaled, (0, of_all, n, m, stagings, staged, drained, buffers, share, WORLD, INTERLEAVED, GROUP_M, SCALES, GROUPS, PARTS, WIDE, STAGES, TARGET)),
                (add_tiles, (out, bias, residual, added, box, room, n, m, epoch, there, taken, share, WORLD, GROUP_M, HIGH, PARTS * WIDE, TARGET)),
                (load_tiles, (a, b, buffers, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_tiles, (boxes, stagings, staged, drained, flags, bases, epoch, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
                (poll_tiles, (flags, epoch, control, there, taken, share, WORLD, GROUP_M, HIGH, TARGET)),
            ],
            [4, 1, 1, 1],
            [184, 88, 88, 88],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (multiply_scaled, (0, of_all, n, m, stagings, staged, drained, buffers, share, WORLD, INTERLEAVED, GROUP_M, SCALES, GROUPS, PARTS, WIDE, STAGES, TARGET)),
                (multiply_scaled, (1, of_all, n, m, stagings, staged, drained, buffers, share, WORLD, INTERLEAVED, GROUP_M, SCALES, GROUPS, PARTS, WIDE, STAGES, TARGET)),
                (add_tiles, (out, bias, residual, added, box, room, n, m, epoch, there, taken, share, WORLD, GROUP_M, HIGH, PARTS * WIDE, TARGET)),
                (load_tiles, (a, b, buffers, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_tiles, (boxes, stagings, staged, drained, flags, bases, epoch, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
                (poll_tiles, (flags, epoch, control, there, taken, share, WORLD, GROUP_M, HIGH, TARGET)),
            ],
            [4, 4, 1, 1, 1],
            [176, 104, 56, 56, 56],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rank", "added"])
def scaled_specialized_kernel(
    a, b, box0, box1, box2, box3, box4, box5, box6, box7, out, bias, residual, added, box, flags, bases, control,
    scales_a, stride_m, stride_g, scales_b, rank, rows, cols, room, n, m,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    await_launch()
    epoch = gl.load(control + EPOCH)
    scatter_scaled(
        a, b, (box0, box1, box2, box3, box4, box5, box6, box7), (scales_a, stride_m, stride_g, scales_b), out, bias, residual, added,
        box, flags, bases, control, rank, epoch, rows, cols, room, n, m,
        WORLD, INTERLEAVED, GROUP_M, SCALES, GROUPS, PARTS, WIDE, STAGES, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class ScaledSpecialized(PushSpecialized):
    """Tensors of a call: see `scaled_sums.Scaled`."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.quantised, self.result = Quantiser(problem, problem.m, context), problem.result
        super().__init__(plain(problem), config, context)
        self.problem = problem
        self.constants = self.constants | {"SCALES": problem.scales} | OVERLAPPING

    def view(self, tensor: Tensor, box: list[int]) -> Any:
        """A TMA descriptor of boxes of a tensor of the type of C, or of codes as words of that type."""
        words = tensor.view(DTYPES[self.result]) if tensor.dtype == CODE else tensor
        return TensorDescriptor.from_tensor(words, box, layout_of(tuple(box), self.result))

    def __call__(self, a: Tensor, b: Tensor, *rest: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        """See Kernel.__call__."""
        of_a, scales_b, out = rest[:-2], rest[-2], rest[-1]
        problem, context = self.problem, self.context
        codes, scales = self.quantised(a, of_a[0] if of_a else None)
        strides = scales.stride() if scales.dim() == 2 else (0, 0)
        context.launch(
            scaled_specialized_kernel,
            (context.processors,),
            self.view(codes, [GROUP_ROWS, BLOCK_K]), self.view(b, [self.wide, BLOCK_K]), *self.boxes,
            out, *addends(out, bias, residual), self.box, self.flags, context.heap.bases, self.control,
            scales, *strides, scales_b,
            context.rank, problem.shard_rows, problem.k // 2, self.room, problem.n, problem.m,
            **self.constants,
        )  # fmt: skip
