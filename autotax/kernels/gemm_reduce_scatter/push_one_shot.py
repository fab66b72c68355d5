"""push_one_shot and scaled_push_one_shot: GEMM + All-Reduce in one trip, by warps with roles. For Hopper, in Gluon.

Every rank sends each tile of its partial sum to all ranks, itself included, and adds up all rows. So no sum travels a second
time, and all tiles but those of the last wave travel while later ones are multiplied. A rank sends (ranks - 1) x m x n elements:
with two ranks as many as in two trips. The warps are those of `push_specialized`. To those that load and multiply there is one
owner, who has all rows; other warps add up. See docs/memory-model.md for why every wait ends.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.roles import X_ROWS, allocate, layout_of, padded, reinterpret, store_block
from autotax.kernels.all_gather_gemm.scaled_shards import CODES as CODE
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.push_specialized import MOST_REGISTERS
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, addends
from autotax.kernels.gemm_reduce_scatter.scatter_roles import add_tiles, load_tiles, multiply_tiles, poll_tiles, tile_at
from autotax.kernels.primitives import EPOCH, flag_address, leave, settle
from autotax.kernels.scaled_roles import CODES, OVERLAPPING, await_launch
from autotax.kernels.tiling import GROUP_ROWS, MOST_RANKS, PART_ROWS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.inputs import DTYPES


@gluon.jit
def send_everywhere(
    boxes, stagings, staged, drained, flags, bases, rank, epoch, share,
    WORLD: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The sender: stores each tile in the inboxes of all ranks, then sets its flag there. Inboxes and flags are as in `send_tiles`.

    The loop is that of `send_tiles` without an owner. It stands apart because shipped winners hold for the source of `send_tiles`.
    """
    items, _, _, _, m_tiles, n_tiles = share
    layout: gl.constexpr = boxes[0].layout
    dtype: gl.constexpr = boxes[0].dtype
    sent = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, block, tile = tile_at(item, m_tiles, n_tiles, 1, False, GROUP_M)
        for step in range(PARTS * GROUPS):
            part = step // GROUPS
            group = step % GROUPS
            mbarrier.wait(staged.index(group), (sent + part) & 1)
            row = (block * GROUPS + group) * X_ROWS
            col = (tile * PARTS + part) * WIDE
            stage = reinterpret(stagings.index(group), dtype, [1, 1, X_ROWS, WIDE], layout).index(0)
            for hop in gl.static_range(WORLD):
                store_block(boxes[hop], [(epoch & 1) * WORLD + rank, row, col], stage)
            tma.store_wait(0)  # until the staged part has been read
            mbarrier.arrive(drained.index(group))
        sent += PARTS
        # Waits until the tile is written, not only read. The proxy fence then orders it before the flags.
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        settle(TARGET)
        gl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        for hop in gl.static_range(WORLD):
            flag = flag_address(flags, (block * n_tiles + tile) * WORLD + rank, bases, rank, (rank + hop) % WORLD)
            gl.atomic_xchg(flag, epoch, sem="relaxed", scope="sys")


@gluon.jit
def sum_tiles(
    a, b, boxes, of_all, out, bias, residual, added, box, flags, bases, control, rank, epoch, m, cols, room, n,
    WORLD: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """A program's part of a call. The arguments are those of `scatter_tiles`; `out` is all of C."""
    HIGH: gl.constexpr = GROUPS * X_ROWS
    m_tiles = gl.cdiv(m, HIGH)
    n_tiles = gl.cdiv(n, PARTS * WIDE)
    buffers, stagings = allocate(a, boxes[0], 1, GROUPS, WIDE, WIDE * (PARTS - 1), 0, STAGES, 1)
    staged = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(staged.index(group), count=1)
        mbarrier.init(drained.index(group), count=1)
    mbarrier.init(landed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    share = (m_tiles * n_tiles, 0, m, cols, m_tiles, n_tiles)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    gl.static_assert(GROUPS <= 2)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, of_all, None, n, m, stagings, staged, drained, buffers, share, 1, False, GROUP_M, SCALES, False, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (add_tiles, (out, bias, residual, added, box, room, n, m, epoch, landed, taken, share, WORLD, GROUP_M, HIGH, PARTS * WIDE, TARGET)),
                (load_tiles, (a, b, buffers, share, 1, False, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_everywhere, (boxes, stagings, staged, drained, flags, bases, rank, epoch, share, WORLD, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
                (poll_tiles, (flags, epoch, control, landed, taken, share, WORLD, GROUP_M, HIGH, TARGET)),
            ],
            [4, 1, 1, 1],
            [184, 88, 88, 88],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, of_all, None, n, m, stagings, staged, drained, buffers, share, 1, False, GROUP_M, SCALES, False, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (multiply_tiles, (1, of_all, None, n, m, stagings, staged, drained, buffers, share, 1, False, GROUP_M, SCALES, False, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (add_tiles, (out, bias, residual, added, box, room, n, m, epoch, landed, taken, share, WORLD, GROUP_M, HIGH, PARTS * WIDE, TARGET)),
                (load_tiles, (a, b, buffers, share, 1, False, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_everywhere, (boxes, stagings, staged, drained, flags, bases, rank, epoch, share, WORLD, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
                (poll_tiles, (flags, epoch, control, landed, taken, share, WORLD, GROUP_M, HIGH, TARGET)),
            ],
            [4, 4, 1, 1, 1],
            [176, 104, 56, 56, 56],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rank", "added"])
def push_one_shot_kernel(
    a, b, box0, box1, box2, box3, box4, box5, box6, box7, out, bias, residual, added, box, flags, bases, control,
    scales_a, stride_m, stride_g, scales_b, rank, m, cols, room, n,
    WORLD: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    if SCALES != "none":
        await_launch()
    epoch = gl.load(control + EPOCH)
    sum_tiles(
        a, b, (box0, box1, box2, box3, box4, box5, box6, box7), (scales_a, stride_m, stride_g, scales_b), out, bias, residual, added,
        box, flags, bases, control, rank, epoch, m, cols, room, n,
        WORLD, GROUP_M, SCALES, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushOneShot(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, n, self.room, self.result = problem.world_size, problem.n, problem.m, problem.out_dtype
        high, across = config["block_m"], config["block_n"]
        self.wide = min(across, PART_ROWS)
        self.box = context.heap.alloc((2, world, self.room, n), DTYPES[self.result])
        self.flags = context.flags(ceil_div(self.room, high) * ceil_div(n, across) * world)
        inboxes = [context.heap.peer(self.box, (context.rank + hop) % world) for hop in range(world)]
        views = [self.view(inbox.view(2 * world, self.room, n), [1, GROUP_ROWS, self.wide]) for inbox in inboxes]
        self.boxes = padded(views, MOST_RANKS, None)
        self.constants = {
            "WORLD": world, "GROUP_M": config["group_m"], "SCALES": "none", "GROUPS": high // GROUP_ROWS, "PARTS": across // self.wide,
            "WIDE": self.wide, "STAGES": config["num_stages"], "STRIPS": 1, "num_warps": 4, "maxnreg": MOST_REGISTERS[high // GROUP_ROWS],
        }  # fmt: skip

    def view(self, tensor: Tensor, box: list[int]) -> Any:
        """A TMA descriptor of boxes of a tensor of the type of C, or of codes as words of that type."""
        words = tensor.view(DTYPES[self.result]) if tensor.dtype == CODE else tensor
        return TensorDescriptor.from_tensor(words, box, layout_of(tuple(box), self.result))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        self.multiply_and_sum(a, b, (None, 0, 0, None), out, addends(out, bias, residual))

    def multiply_and_sum(self, a: Tensor, b: Tensor, scales: tuple[Any, ...], out: Tensor, added: tuple[Any, Any, Any]) -> None:
        """One launch; `scales` are those of A with their strides, and those of B."""
        problem, context = self.problem, self.context
        context.launch(
            push_one_shot_kernel, (context.processors,),
            self.view(a, [GROUP_ROWS, tiling.BLOCK_K]), self.view(b, [self.wide, tiling.BLOCK_K]), *self.boxes,
            out, *added, self.box, self.flags, context.heap.bases, self.control, *scales,
            context.rank, problem.m, problem.k * a.itemsize // 2, self.room, problem.n, **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Supports any number of rows: slots and flags keep their places, and a flag is set to the number of the call."""
        return {}


class ScaledPushOneShot(PushOneShot):
    """`PushOneShot` for e4m3; `scaled_roles` says how its groups multiply. Tensors of a call: see `scaled_sums.Scaled`."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.quantised = Quantiser(problem, problem.m, context)
        super().__init__(problem, config, context)
        self.constants = self.constants | {"SCALES": problem.scales, "STRIPS": config["strip"] // CODES.value} | OVERLAPPING

    def __call__(self, a: Tensor, b: Tensor, *rest: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        of_a, scales_b, out = rest[:-2], rest[-2], rest[-1]
        codes, scales = self.quantised(a, of_a[0] if of_a else None)
        strides = scales.stride() if scales.dim() == 2 else (0, 0)
        self.multiply_and_sum(codes, b, (scales, *strides, scales_b), out, addends(out, bias, residual))
