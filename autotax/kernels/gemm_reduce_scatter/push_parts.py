"""push_parts: `push_specialized` for few tiles. K is cut in two, and the products of both parts travel and are added up apart.

Where all tiles are one wave, none is complete before the last, and sending and adding follow the product. With K cut all programs
first compute parts of tiles of other ranks, and send them while they compute this rank's own. The first part is the shorter one: a
program with a short part of another rank's tile has a long one of its own, and the reverse. So half of what is sent can leave
early, and the links are busy until the product ends. They carry twice the bytes.

Waits and slots: see `push_specialized`. Each part of a tile has a flag of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.roles import (
    BLOCK_K,
    X_ROWS,
    allocate,
    load_groups,
    load_parts,
    reinterpret,
    store_block,
)
from autotax.kernels.all_gather_gemm.views import layout_of, padded
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.addends import Adding, addends
from autotax.kernels.gemm_reduce_scatter.push_specialized import MOST_REGISTERS
from autotax.kernels.gemm_reduce_scatter.warps import add_tiles, poll_tiles, stage_part, tile_at
from autotax.kernels.primitives import EPOCH, flag_address, leave, settle
from autotax.kernels.tiling import GROUP_ROWS, MOST_RANKS, PART_ROWS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

PIECES = gl.constexpr(2)
"""Parts of K."""


@gluon.jit
def piece_of(item, share, WORLD: gl.constexpr, FIRST: gl.constexpr):
    """The part of an item, and its columns of K from ... to. Items 2 t and 2 t + 1 are the parts of tile t. The first part has
    FIRST eighths of K.
    """
    _, _, _, cols, m_tiles, n_tiles = share
    blocks = gl.cdiv(cols, BLOCK_K)
    cut = blocks * FIRST // 8 * BLOCK_K
    part = item % PIECES
    if item >= PIECES * (WORLD - 1) * m_tiles * n_tiles:
        part = 1 - part
    return part, part * cut, cut + part * (blocks * BLOCK_K - cut)


@gluon.jit
def load_pieces(
    a, b, buffers, share, FIRST: gl.constexpr,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loader, as `warps.load_tiles`."""
    x, y, full, empty = buffers
    items, rank, rows, _, m_tiles, n_tiles = share
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item // PIECES, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        row = (rank + hop) % WORLD * rows + block * (GROUPS * X_ROWS)
        _, start, end = piece_of(item, share, WORLD, FIRST)
        for at in range(start, end, BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, (GROUPS * X_ROWS + PARTS * WIDE) * BLOCK_K * 2)
            load_parts((b, b, b), tile * (PARTS * WIDE), at, loaded, y, stage, WIDE, WIDE * (PARTS - 1), 0)
            load_groups(a, row, at, loaded, x, stage, 0, GROUPS, GROUPS)
            turn += 1


@gluon.jit
def multiply_pieces(
    GROUP: gl.constexpr, stagings, staged, drained, buffers, share, FIRST: gl.constexpr, WORLD: gl.constexpr,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """One group of warps, as `warps.multiply_tiles`."""
    x, y, full, empty = buffers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    turn = 0
    sent = 0
    for item in range(gl.program_id(0), share[0], gl.num_programs(0)):
        _, start, end = piece_of(item, share, WORLD, FIRST)
        one = gl.zeros([X_ROWS, WIDE], gl.float32, layout)
        two = gl.zeros([X_ROWS, WIDE], gl.float32, layout)
        for at in range(start, end, BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            mine = x.index(stage * GROUPS + GROUP)
            one = warpgroup_mma(mine, y[0].index(stage).permute((1, 0)), one, is_async=True)
            # After this wait the products of the previous buffer are complete.
            if PARTS == 2:
                two = warpgroup_mma(mine, y[1].index(stage).permute((1, 0)), two, is_async=True)
                one, two = warpgroup_mma_wait(num_outstanding=2, deps=(one, two))
            else:
                one = warpgroup_mma_wait(num_outstanding=1, deps=(one,))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=at > start)
            turn += 1
        if PARTS == 2:
            one, two = warpgroup_mma_wait(num_outstanding=0, deps=(one, two))
        else:
            one = warpgroup_mma_wait(num_outstanding=0, deps=(one,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES))
        stage_part(one, stagings.index(GROUP), staged.index(GROUP), drained.index(GROUP), sent, TARGET)
        if PARTS == 2:
            stage_part(two, stagings.index(GROUP), staged.index(GROUP), drained.index(GROUP), sent + 1, TARGET)
        sent += PARTS


@gluon.jit
def send_pieces(
    boxes, stagings, staged, drained, flags, bases, epoch, share, FIRST: gl.constexpr,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The sender, as `warps.send_tiles`. `boxes` are views [2 * PIECES * WORLD, rows, n]; flags are [row of tiles, tile of the row,
    part, source].
    """
    items, rank, _, _, m_tiles, n_tiles = share
    layout: gl.constexpr = boxes[0].layout
    dtype: gl.constexpr = boxes[0].dtype
    sent = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item // PIECES, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        piece, _, _ = piece_of(item, share, WORLD, FIRST)
        source = piece * WORLD + rank
        for step in range(PARTS * GROUPS):
            part = step // GROUPS
            group = step % GROUPS
            mbarrier.wait(staged.index(group), (sent + part) & 1)
            row = (block * GROUPS + group) * X_ROWS
            col = (tile * PARTS + part) * WIDE
            stage = reinterpret(stagings.index(group), dtype, [1, 1, X_ROWS, WIDE], layout).index(0)
            for to in gl.static_range(WORLD):
                if hop == to:
                    store_block(boxes[to], [(epoch & 1) * (PIECES * WORLD) + source, row, col], stage)
            tma.store_wait(0)  # until the staged part has been read
            mbarrier.arrive(drained.index(group))
        sent += PARTS
        # As in `warps.send_tiles`: written, not only read, and before the flag.
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        settle(TARGET)
        gl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        index = (block * n_tiles + tile) * (PIECES * WORLD) + source
        gl.atomic_xchg(flag_address(flags, index, bases, rank, (rank + hop) % WORLD), epoch, sem="relaxed", scope="sys")


@gluon.jit
def scatter_pieces(
    a, b, boxes, out, bias, residual, added, box, flags, bases, control, rank, epoch, rows, cols, room, n, m,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Runs a program's part of a call, as `warps.scatter_tiles` for two groups. `box` is [2, part, source, room, n]."""
    SOURCES: gl.constexpr = PIECES * WORLD
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
    share = (SOURCES * m_tiles * n_tiles, rank, rows, cols, m_tiles, n_tiles)
    gl.static_assert(GROUPS == 2)
    gl.warp_specialize(
        [
            (multiply_pieces, (0, stagings, staged, drained, buffers, share, FIRST, WORLD, GROUPS, PARTS, WIDE, STAGES, TARGET)),
            (multiply_pieces, (1, stagings, staged, drained, buffers, share, FIRST, WORLD, GROUPS, PARTS, WIDE, STAGES, TARGET)),
            (add_tiles, (out, bias, residual, added, box, room, n, m, epoch, there, taken, share, SOURCES, GROUP_M, HIGH, PARTS * WIDE, TARGET)),
            (load_pieces, (a, b, buffers, share, FIRST, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
            (send_pieces, (boxes, stagings, staged, drained, flags, bases, epoch, share, FIRST, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
            (poll_tiles, (flags, epoch, control, there, taken, share, SOURCES, GROUP_M, HIGH, TARGET)),
        ],
        [4, 4, 1, 1, 1],
        [176, 104, 56, 56, 56],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rank", "added"])
def push_parts_kernel(
    a, b, box0, box1, box2, box3, box4, box5, box6, box7, out, bias, residual, added, box, flags, bases, control,
    rank, rows, cols, room, n, m,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    scatter_pieces(
        a, b, (box0, box1, box2, box3, box4, box5, box6, box7), out, bias, residual, added, box, flags, bases, control,
        rank, epoch, rows, cols, room, n, m,
        WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES, FIRST, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushParts(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, n, self.room = problem.world_size, problem.n, problem.shard_rows
        across, sources = config["block_n"], PIECES.value * world
        self.wide = min(across, PART_ROWS)
        high = GROUPS * GROUP_ROWS
        self.box = context.heap.alloc((2, sources, self.room, n), context.dtype(problem))
        self.flags = context.flags(ceil_div(self.room, high) * ceil_div(n, across) * sources)
        inboxes = [context.heap.peer(self.box, (context.rank + hop) % world) for hop in range(world)]
        views = [self.view(inbox.view(2 * sources, self.room, n), [1, GROUP_ROWS, self.wide]) for inbox in inboxes]
        self.boxes = padded(views, MOST_RANKS, None)
        self.constants = {
            "WORLD": world,
            "INTERLEAVED": config["order"] == "interleaved",
            "GROUP_M": config["group_m"],
            "GROUPS": GROUPS,
            "PARTS": across // self.wide,
            "WIDE": self.wide,
            "STAGES": config["num_stages"],
            "FIRST": config["first"],
            "num_warps": 4,
            "maxnreg": MOST_REGISTERS[GROUPS],
        }

    def view(self, tensor: Tensor, box: list[int]) -> Any:
        """A TMA descriptor of boxes of a tensor."""
        return TensorDescriptor.from_tensor(tensor, box, layout_of(tuple(box), self.problem.dtype))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context = self.problem, self.context
        context.launch(
            push_parts_kernel,
            (context.processors,),
            self.view(a, [GROUP_ROWS, tiling.BLOCK_K]), self.view(b, [self.wide, tiling.BLOCK_K]), *self.boxes,
            out, *addends(out, bias, residual), self.box, self.flags, context.heap.bases, self.control,
            context.rank, problem.shard_rows, problem.k, self.room, problem.n, problem.m,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """See PushSpecialized.changes_for."""
        return {}


GROUPS = 2
"""Groups that multiply: tiles have 128 rows."""
