"""push_parts: `push_specialized` for few tiles. K is cut in two halves, which a rank adds up before it sends their sum.

Where all tiles are one wave, none is complete before the last, and sending and adding follow the product. With K cut all programs
first compute the halves of tiles of other ranks. The halves of a tile meet in memory of the rank that computes them. The adding
warps add them up and store the sum at its owner while this rank's tiles are computed. Then they add up the halves of this rank's
tiles and the sums of the other ranks, in float32 and in the order of the ranks. Multiplying groups join them when they have
multiplied.

Waits: loaders and multiplying groups wait for each other, senders for the groups of their program, none of them for another
program. Adders first wait for halves of this rank, which senders of this rank announce. Then they wait for sums of other ranks,
whose adders waited for halves only. All programs are resident, one a processor. So every wait ends.

Halves have one slot: a call writes them after the previous kernel of the stream, which read them, has ended. The inbox of sums has
two slots, as in `push_specialized`. Each flag has one writer, which sets it to the number of the call.
"""

from __future__ import annotations

from typing import Any

import torch
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
    wait_first,
)
from autotax.kernels.all_gather_gemm.views import layout_of
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.addends import Adding, addends
from autotax.kernels.gemm_reduce_scatter.push_specialized import MOST_REGISTERS
from autotax.kernels.gemm_reduce_scatter.warps import PIECE_ROWS, stage_part, tile_at
from autotax.kernels.primitives import EPOCH, flag_address, leave, settle, translate
from autotax.kernels.tiling import GROUP_ROWS, PART_ROWS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

HALVES = gl.constexpr(2)
WORKERS = gl.constexpr(3)
"""Partitions of warps that add up this rank's rows: the adders, and both groups when they have multiplied."""


@gluon.jit
def columns_of(item, cols):
    """The columns of K of an item, from ... to. Items 2 t and 2 t + 1 are the halves of tile t."""
    cut = gl.cdiv(cols, HALVES * BLOCK_K) * BLOCK_K
    half = item % HALVES
    return half * cut, cut + half * (gl.cdiv(cols, BLOCK_K) * BLOCK_K - cut)


@gluon.jit
def load_halves(
    a, b, buffers, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loader, as `warps.load_tiles`."""
    x, y, full, empty = buffers
    items, rank, rows, cols, m_tiles, n_tiles = share
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item // HALVES, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        row = (rank + hop) % WORLD * rows + block * (GROUPS * X_ROWS)
        start, end = columns_of(item, cols)
        for at in range(start, end, BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, (GROUPS * X_ROWS + PARTS * WIDE) * BLOCK_K * 2)
            load_parts((b, b, b), tile * (PARTS * WIDE), at, loaded, y, stage, WIDE, WIDE * (PARTS - 1), 0)
            load_groups(a, row, at, loaded, x, stage, 0, GROUPS, GROUPS)
            turn += 1


@gluon.jit
def multiply_halves(
    GROUP: gl.constexpr, stagings, staged, drained, buffers, share,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """One group of warps, as `warps.multiply_tiles`."""
    x, y, full, empty = buffers
    items, _, _, cols, _, _ = share
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    turn = 0
    sent = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        start, end = columns_of(item, cols)
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
def publish(flag, epoch, TARGET: gl.constexpr):
    """Sets a flag of any rank behind all stores of this partition of warps."""
    settle(TARGET)
    gl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.atomic_xchg(flag, epoch, sem="relaxed", scope="sys")


@gluon.jit
def store_halves(
    view, stagings, staged, drained, flags, epoch, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The sender, as `warps.send_tiles`: stores halves in `view` [half * WORLD + hop, rows, n]. Flags are [hop, row of tiles, tile of
    the row, half].
    """
    items, _, _, _, m_tiles, n_tiles = share
    layout: gl.constexpr = view.layout
    dtype: gl.constexpr = view.dtype
    sent = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item // HALVES, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        half = item % HALVES
        for step in range(PARTS * GROUPS):
            part = step // GROUPS
            group = step % GROUPS
            mbarrier.wait(staged.index(group), (sent + part) & 1)
            row = (block * GROUPS + group) * X_ROWS
            col = (tile * PARTS + part) * WIDE
            stage = reinterpret(stagings.index(group), dtype, [1, 1, X_ROWS, WIDE], layout).index(0)
            store_block(view, [half * WORLD + hop, row, col], stage)
            tma.store_wait(0)  # until the staged part has been read
            mbarrier.arrive(drained.index(group))
        sent += PARTS
        # As in `warps.send_tiles`: written, not only read, and before the flag.
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        publish(flags + ((hop * m_tiles + block) * n_tiles + tile) * HALVES + half, epoch, TARGET)


@gluon.jit
def poll_pieces(
    flags, sum_flags, epoch, control, there, taken, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, HIGH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The poller: for each piece, waits until its halves have come, and for this rank's rows also the sums of the other ranks. It
    signals the worker of the piece.
    """
    _, rank, _, _, m_tiles, n_tiles = share
    down: gl.constexpr = HIGH // PIECE_ROWS
    programs = gl.num_programs(0)
    pieces = m_tiles * n_tiles * down
    turn = 0
    for piece in range(gl.program_id(0), (WORLD - 1) * pieces, programs):
        hop, block, tile = tile_at(piece // down, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        await_halves(flags, ((hop * m_tiles + block) * n_tiles + tile) * HALVES, rank, epoch, control, TARGET)
        pass_on(there.index(0), taken.index(0), turn)
        turn += 1
    count = 0
    for piece in range(gl.program_id(0), pieces, programs):
        _, block, tile = tile_at((WORLD - 1) * m_tiles * n_tiles + piece // down, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        await_halves(flags, (block * n_tiles + tile) * HALVES, rank, epoch, control, TARGET)
        first = ((block * n_tiles + tile) * down + piece % down) * WORLD
        ready = 1
        while ready < WORLD:
            ready += wait_first(sum_flags, first + ready, WORLD - ready, (rank + ready) % WORLD, epoch, control, 1, TARGET)
        worker = count % WORKERS
        if worker == 0:
            pass_on(there.index(0), taken.index(0), turn)
            turn += 1
        else:
            pass_on(there.index(worker), taken.index(worker), count // WORKERS)
        count += 1  # noqa: SIM113


@gluon.jit
def await_halves(flags, first, rank, epoch, control, TARGET: gl.constexpr):
    ready = 0
    while ready < HALVES:
        ready += wait_first(flags, first + ready, HALVES - ready, rank, epoch, control, 1, TARGET)


@gluon.jit
def pass_on(there, taken, turn):
    """Signals a worker, once it has taken the signal before."""
    mbarrier.wait(taken, (turn & 1) ^ 1)
    mbarrier.arrive(there)


@gluon.jit
def take(there, taken, turn, TARGET: gl.constexpr):
    """Waits for the poller's signal."""
    mbarrier.wait(there, turn & 1)
    settle(TARGET)  # else the poller could end the next phase before all four warps have seen this one
    mbarrier.arrive(taken)


@gluon.constexpr_function
def layout_of_pieces(wide):
    return gl.BlockedLayout([1, 8], [256 // wide, wide // 8], [4, 1], [1, 0])


@gluon.jit
def places(block, tile, within, rows, n, HIGH: gl.constexpr, WIDE: gl.constexpr):
    """Offsets of the elements of a piece in rows of n, a mask of those that exist, and the rows and columns."""
    layout: gl.constexpr = layout_of_pieces(WIDE)
    r = block * HIGH + within * PIECE_ROWS + gl.arange(0, PIECE_ROWS, layout=gl.SliceLayout(1, layout))
    c = tile * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
    return r.to(gl.int64)[:, None] * n + c[None, :], (r < rows)[:, None] & (c < n)[None, :], r, c


@gluon.jit
def sum_of_halves(halves, hop, at, inside, size, WORLD: gl.constexpr):
    """The float32 sum of both halves of a piece. Bypasses the L1, because nothing invalidates it for these warps."""
    first = halves + gl.cast(hop, gl.int64) * size
    one = gl.load(first + at, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    return one + gl.load(first + WORLD * size + at, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)


@gluon.jit
def send_sums(
    halves, box, sum_flags, bases, room, n, epoch, there, taken, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, HIGH: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The adders, for rows of other ranks. `halves` are [half, hop, room, n], `box` [2, source, room, n], n a multiple of 8. Flags of
    sums are [piece, hops from the owner to the source].
    """
    _, rank, rows, _, m_tiles, n_tiles = share
    n = n // 8 * 8  # shows the compiler the alignment
    size = gl.cast(room, gl.int64) * n
    down: gl.constexpr = HIGH // PIECE_ROWS
    turn = 0
    for piece in range(gl.program_id(0), (WORLD - 1) * m_tiles * n_tiles * down, gl.num_programs(0)):
        hop, block, tile = tile_at(piece // down, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        at, inside, _r, _c = places(block, tile, piece % down, rows, n, HIGH, WIDE)
        take(there.index(0), taken.index(0), turn, TARGET)
        own = sum_of_halves(halves, hop, at, inside, size, WORLD)
        owner = (rank + hop) % WORLD
        at_owner = translate(box + ((epoch & 1) * WORLD + rank) * size, bases, rank, owner)
        # The address comes from an integer. Without the hint the stores would be two bytes wide.
        gl.store(gl.multiple_of(at_owner + at, (2, 16)), own.to(box.dtype.element_ty), mask=inside)
        index = ((block * n_tiles + tile) * down + piece % down) * WORLD + WORLD - hop
        publish(flag_address(sum_flags, index, bases, rank, owner), epoch, TARGET)
        turn += 1
    return turn


@gluon.jit
def add_own(
    WORKER: gl.constexpr, before, out, bias, residual, added, halves, box, room, n, m, epoch, there, taken, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, HIGH: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """One of the WORKERS of a program, for its share of this rank's rows. The poller has signalled it `before` times."""
    _, rank, rows, _, m_tiles, n_tiles = share
    n = n // 8 * 8  # shows the compiler the alignment
    size = gl.cast(room, gl.int64) * n
    down: gl.constexpr = HIGH // PIECE_ROWS
    remote = (WORLD - 1) * m_tiles * n_tiles
    programs = gl.num_programs(0)
    turn = 0
    for piece in range(gl.program_id(0) + WORKER * programs, m_tiles * n_tiles * down, WORKERS * programs):
        _, block, tile = tile_at(remote + piece // down, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        at, inside, r, c = places(block, tile, piece % down, rows, n, HIGH, WIDE)
        take(there.index(WORKER), taken.index(WORKER), before + turn, TARGET)
        own = sum_of_halves(halves, 0, at, inside, size, WORLD)
        total = gl.zeros([PIECE_ROWS, WIDE], gl.float32, layout_of_pieces(WIDE))
        for source in gl.static_range(WORLD):
            first = ((epoch & 1) * WORLD + source) * size
            sent = gl.load(box + first + at, mask=inside & (source != rank), other=0.0, cache_modifier=".cg")
            total += sent.to(gl.float32)
            if source == rank:
                total += own
        if added is not None:
            below = (r < m - rank * rows)[:, None]  # rows that are not padding
            shared = gl.load(bias + c, mask=(c < n) & (added % 2 == 1), other=0.0).to(gl.float32)
            total += gl.where(below, shared[None, :], 0.0)
            total += gl.load(residual + at, mask=inside & below & (added >= 2), other=0.0).to(gl.float32)
        gl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
        turn += 1  # noqa: SIM113


@gluon.jit
def multiply_and_add(
    GROUP: gl.constexpr, stagings, staged, drained, buffers, out, bias, residual, added, halves, box, room, n, m, epoch, there, taken, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    multiply_halves(GROUP, stagings, staged, drained, buffers, share, GROUPS, PARTS, WIDE, STAGES, TARGET)
    add_own(
        GROUP + 1, 0, out, bias, residual, added, halves, box, room, n, m, epoch, there, taken, share,
        WORLD, INTERLEAVED, GROUP_M, GROUPS * X_ROWS, PARTS * WIDE, TARGET,
    )  # fmt: skip


@gluon.jit
def send_and_add(
    out, bias, residual, added, halves, box, sum_flags, bases, room, n, m, epoch, there, taken, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, HIGH: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The adders."""
    turn = send_sums(
        halves, box, sum_flags, bases, room, n, epoch, there, taken, share, WORLD, INTERLEAVED, GROUP_M, HIGH, WIDE, TARGET
    )  # fmt: skip
    add_own(
        0, turn, out, bias, residual, added, halves, box, room, n, m, epoch, there, taken, share,
        WORLD, INTERLEAVED, GROUP_M, HIGH, WIDE, TARGET,
    )  # fmt: skip


@gluon.jit
def scatter_halves(
    a, b, view, halves, flags, box, sum_flags, out, bias, residual, added, bases, control, rank, epoch, rows, cols, room, n, m,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    """Runs a program's part of a call, as `warps.scatter_tiles` for two groups. `view` is a TMA descriptor of `halves`."""
    HIGH: gl.constexpr = GROUPS * X_ROWS
    m_tiles = gl.cdiv(rows, HIGH)
    n_tiles = gl.cdiv(n, PARTS * WIDE)
    buffers, stagings = allocate(a, view, 1, False, GROUPS, WIDE, WIDE * (PARTS - 1), 0, STAGES, 1)
    staged = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [WORKERS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [WORKERS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(staged.index(group), count=1)
        mbarrier.init(drained.index(group), count=1)
    for worker in gl.static_range(WORKERS):
        mbarrier.init(there.index(worker), count=1)
        mbarrier.init(taken.index(worker), count=1)
    fence_async_shared()
    share = (HALVES * WORLD * m_tiles * n_tiles, rank, rows, cols, m_tiles, n_tiles)
    gl.static_assert(GROUPS == 2)
    gl.warp_specialize(
        [
            (multiply_and_add, (0, stagings, staged, drained, buffers, out, bias, residual, added, halves, box, room, n, m, epoch, there, taken, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES, TARGET)),
            (multiply_and_add, (1, stagings, staged, drained, buffers, out, bias, residual, added, halves, box, room, n, m, epoch, there, taken, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES, TARGET)),
            (send_and_add, (out, bias, residual, added, halves, box, sum_flags, bases, room, n, m, epoch, there, taken, share, WORLD, INTERLEAVED, GROUP_M, HIGH, PARTS * WIDE, TARGET)),
            (load_halves, (a, b, buffers, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
            (store_halves, (view, stagings, staged, drained, flags, epoch, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
            (poll_pieces, (flags, sum_flags, epoch, control, there, taken, share, WORLD, INTERLEAVED, GROUP_M, HIGH, TARGET)),
        ],
        [4, 4, 1, 1, 1],
        [176, 104, 56, 56, 56],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rank", "added"])
def push_parts_kernel(
    a, b, view, halves, flags, box, sum_flags, out, bias, residual, added, bases, control, rank, rows, cols, room, n, m,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    scatter_halves(
        a, b, view, halves, flags, box, sum_flags, out, bias, residual, added, bases, control, rank, epoch, rows, cols, room, n, m,
        WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushParts(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, n, self.room, across = problem.world_size, problem.n, problem.shard_rows, config["block_n"]
        self.wide = min(across, PART_ROWS)
        tiles = ceil_div(self.room, GROUPS * GROUP_ROWS) * ceil_div(n, across)
        dtype, halves = context.dtype(problem), HALVES.value
        self.halves = context.empty((halves * world, self.room, n), dtype)
        self.flags = context.empty((world * tiles * halves,), torch.int32).zero_()
        self.box = context.heap.alloc((2, world, self.room, n), dtype)
        self.sum_flags = context.flags(tiles * GROUPS * GROUP_ROWS // PIECE_ROWS.value * world)
        self.constants = {
            "WORLD": world,
            "INTERLEAVED": config["order"] == "interleaved",
            "GROUP_M": config["group_m"],
            "GROUPS": GROUPS,
            "PARTS": across // self.wide,
            "WIDE": self.wide,
            "STAGES": config["num_stages"],
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
            self.view(a, [GROUP_ROWS, tiling.BLOCK_K]), self.view(b, [self.wide, tiling.BLOCK_K]),
            self.view(self.halves, [1, GROUP_ROWS, self.wide]), self.halves, self.flags, self.box, self.sum_flags,
            out, *addends(out, bias, residual), context.heap.bases, self.control,
            context.rank, problem.shard_rows, problem.k, self.room, problem.n, problem.m,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """See PushSpecialized.changes_for."""
        return {}


GROUPS = 2
"""Groups that multiply: tiles have 128 rows."""
