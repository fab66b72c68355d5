"""The parts of warp-specialized kernels that do not depend on how shards arrive: tiles, waits, loads, products,
stores. For Hopper, in Gluon.

A tile of C [BLOCK_M, BLOCK_N] has two sides, X and Y. Each group of four warps multiplies 64 rows of X by all of Y. Y has one to
three parts of Y1, Y2 and Y3 rows (powers of two; 0 if a part is missing). So a tile may be 160, 192, 224 or 320 wide. One wave of
such tiles can fit where a width of 256 would leave processors idle and 128 would need two waves. X is a block of A, or with
X_IS_B a block of B. In the latter case a group computes the transpose and transposes it back while storing.

Blocks of K pass through STAGES buffers in shared memory. Each buffer has DEPTH strips of 64 columns and two barriers.
The loading warp waits until a buffer is empty and issues a TMA load, whose arrival completes the barrier `full`. A
multiplying group waits for `full`, and arrives at `empty` when its products of that buffer are done.
"""

from __future__ import annotations

import functools
from typing import TypeVar

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.gemm import grouped, remote_row
from autotax.kernels.primitives import ERROR, LIMIT, note_missing, settle
from autotax.kernels.tiling import GROUP_ROWS, parts_of, sides, x_is_a_block_of_b

T = TypeVar("T")

GLUON_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
MOST_PARTS = 3


class Views:
    """Arguments of a kernel for a tile: its sides as constants, and TMA boxes of a block of A and of the parts of a block of B and
    of C. A box of C is [shards, rows, columns] with at most `staged` columns. See `tiling.sides`.
    """

    def __init__(self, config: Config, dtype: str, staged: int = tiling.PART_ROWS) -> None:
        self.dtype = dtype
        x_is_b = x_is_a_block_of_b(config["block_m"], config["block_n"])
        x, y = sides(config["block_m"], config["block_n"])
        parts = parts_of(y)
        box_x, boxes_y = [GROUP_ROWS, tiling.BLOCK_K], [[part, tiling.BLOCK_K] for part in parts]
        self.box_a, self.boxes_b = (boxes_y[0], [box_x]) if x_is_b else (box_x, boxes_y)
        self.boxes_out = [[1, part, GROUP_ROWS] if x_is_b else [1, GROUP_ROWS, min(part, staged)] for part in parts]
        self.groups = x // GROUP_ROWS
        self.constants = {
            "X_IS_B": x_is_b, "GROUPS": self.groups,
            **{f"Y{number}": part for number, part in enumerate(padded(parts, MOST_PARTS, 0), 1)},
            "STAGES": config["num_stages"], "num_warps": 4,
        }  # fmt: skip

    def of(self, matrix: Tensor, box: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrix, box, layout_of(tuple(box), self.dtype))

    def of_a(self, a: Tensor) -> TensorDescriptor:
        return self.of(a, self.box_a)

    def of_b(self, b: Tensor) -> list[TensorDescriptor | None]:
        return padded([self.of(b, box) for box in self.boxes_b], MOST_PARTS, None)

    def of_out(self, out: Tensor) -> list[TensorDescriptor | None]:
        return padded([self.of(out, box) for box in self.boxes_out], MOST_PARTS, None)


@functools.cache
def layout_of(block: tuple[int, ...], dtype: str) -> gl.NVMMASharedLayout:
    """The layout of a block in shared memory. Cached, because each eager call needs several layouts."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])


def padded(items: list[T], length: int, missing: T) -> list[T]:
    """Pads `items` to the number of the kernel's arguments: a launch takes no descriptors in a tuple."""
    return items + [missing] * (length - len(items))


X_ROWS = gl.constexpr(tiling.GROUP_ROWS)
"""Rows of X that each group multiplies."""
BLOCK_K = gl.constexpr(tiling.BLOCK_K)

# Triton 3.8 and 3.9 renamed these functions.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def tile_at(
    item, rank, rows, n_tiles, WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Returns the first row of C and the first column of the item-th tile. Tiles of this rank's shard come first.

    With ACROSS a tile may span two shards or more. The first tile is one with rows of this rank's shard.
    """
    if ACROSS:
        m_tiles = gl.cdiv(WORLD * rows, BLOCK_M)
        place = grouped(item, m_tiles, n_tiles, GROUP_M)
        row = (place // n_tiles + rank * rows // BLOCK_M) % m_tiles * BLOCK_M
    else:
        m_tiles = rows // BLOCK_M
        place = item
        row = rank * rows
        if item < m_tiles * n_tiles:
            place = grouped(item, m_tiles, n_tiles, GROUP_M)
            row = rank * rows + place // n_tiles * BLOCK_M
        else:
            place = grouped(item - m_tiles * n_tiles, (WORLD - 1) * m_tiles, n_tiles, GROUP_M)
            position = remote_row(place // n_tiles, m_tiles, WORLD, INTERLEAVED)
            row = (rank + WORLD - position // m_tiles) % WORLD * rows + position % m_tiles * BLOCK_M
    return row, place % n_tiles * BLOCK_N


@gluon.jit
def load_groups(view, row, at, loaded, x, stage, FIRST: gl.constexpr, END: gl.constexpr, GROUPS: gl.constexpr):
    """Issues the loads of the rows of X of some groups, for the block at `row`. They arrive at the barrier `loaded`."""
    for group in gl.static_range(FIRST, END):
        load_block(view, [row + group * X_ROWS, at], loaded, x.index(stage * GROUPS + group))


@gluon.jit
def load_parts(views, row, at, loaded, y, stage, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr):
    """Issues the loads of the parts of Y."""
    load_block(views[0], [row, at], loaded, y[0].index(stage))
    if Y2:
        load_block(views[1], [row + Y1, at], loaded, y[1].index(stage))
    if Y3:
        load_block(views[2], [row + Y1 + Y2, at], loaded, y[2].index(stage))


@gluon.jit
def look(flags, first, count, epoch):
    """Returns how many of up to 32 consecutive flags, beginning with the first, have reached the epoch without a gap.
    `count` is the number of flags in all. Each lane reads one flag.
    """
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    address = flags.to(gl.int64) + 4 * (first + gl.minimum(lanes, count - 1))
    seen = gl.inline_asm_elementwise("ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)
    # A peer is at most one call ahead. A flag unused for many calls must not count as raised when epochs wrap around.
    return gl.minimum(gl.min(gl.where((seen != epoch) & (seen != epoch + 1), lanes, 32), 0), count)


@gluon.jit
def wait_first(flags, first, count, source, epoch, control, PATIENCE: gl.constexpr, TARGET: gl.constexpr):
    """Waits for the first of `count` flags and returns how many have arrived without a gap; see `primitives.wait`.

    Waits for programs of the same rank get more PATIENCE than waits for peers, so that the first note names the missing peer.
    """
    arrived = look(flags, first, count, epoch)
    if arrived == 0:
        limit = gl.load(control + LIMIT) * PATIENCE
        polls = 0
        while (arrived == 0) & (polls < limit):
            arrived = look(flags, first, count, epoch)
            polls += 1
            if polls % 1024 == 0:
                if gl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                    polls = limit
        if arrived == 0:
            note_missing(control, source, first, epoch, gl.load(flags + first), TARGET)
            arrived = 1
    # TMA reads through the asynchronous proxy, and the lane that polled a flag is not the lane that issues the loads.
    gl.inline_asm_elementwise("fence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    settle(TARGET)
    return arrived


@gluon.jit
def allocate(
    a, out, LOADERS: gl.constexpr,
    GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Allocates buffers for blocks, (x, parts of y, full, empty), which LOADERS warps fill, and a staging area per
    group for its stores, of the size of a box of `out`. Their types follow `a` and `out`.
    """
    dtype: gl.constexpr = a.dtype
    layout: gl.constexpr = a.layout
    layout_out: gl.constexpr = out.layout
    x = gl.allocate_shared_memory(dtype, [STAGES * DEPTH * GROUPS, X_ROWS, BLOCK_K], layout)
    y1 = gl.allocate_shared_memory(dtype, [STAGES * DEPTH, Y1, BLOCK_K], layout)
    y2 = y1
    y3 = y1
    if Y2:
        y2 = gl.allocate_shared_memory(dtype, [STAGES * DEPTH, Y2, BLOCK_K], layout)
    if Y3:
        y3 = gl.allocate_shared_memory(dtype, [STAGES * DEPTH, Y3, BLOCK_K], layout)
    staged: gl.constexpr = gl.NVMMASharedLayout(layout_out.swizzle_byte_width, layout_out.element_bitwidth, 2)
    stagings = gl.allocate_shared_memory(dtype, [GROUPS, out.block_shape[1], out.block_shape[2]], staged)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=LOADERS)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return (x, (y1, y2, y3), full, empty), stagings


@gluon.jit
def store_part(out, part, staging, row, col, rows, X_IS_B: gl.constexpr, TARGET: gl.constexpr):
    """Stores `part`, with X_IS_B transposed, in C from (row, col) on, by way of `staging`. Rows beyond the shard are left out."""
    tma.store_wait(0)  # until the previous store has read the staging area
    HIGH: gl.constexpr = out.block_shape[1]
    WIDE: gl.constexpr = out.block_shape[2]
    blocks: gl.constexpr = staging.shape[0] * staging.shape[1] // (HIGH * WIDE)
    flat: gl.constexpr = gl.NVMMASharedLayout(out.layout.swizzle_byte_width, out.layout.element_bitwidth, 2)
    stage = reinterpret(staging, out.dtype, [blocks, HIGH, WIDE], flat).index(0)
    if X_IS_B:
        stage.permute((1, 0)).store(part.to(out.dtype))
    else:
        stage.store(part.to(out.dtype))
    fence_async_shared()
    settle(TARGET)
    source = row // rows
    store_block(out, [source, row - source * rows, col], reinterpret(staging, out.dtype, [blocks, 1, HIGH, WIDE], out.layout).index(0))


@gluon.jit
def codes_of(words, ROWS: gl.constexpr):
    """A block of words [ROWS, 64] in shared memory as codes [ROWS, 128] of e4m3."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    return reinterpret(words, gl.float8e4nv, [ROWS, 2 * BLOCK_K], layout)


@gluon.jit
def block_of(words, ROWS: gl.constexpr, OF_CODES: gl.constexpr):
    """A block as tensor cores read it: the words themselves, or their codes."""
    block = words
    if OF_CODES:
        block = codes_of(words, ROWS)
    return block


@gluon.jit
def products_of(
    GROUP: gl.constexpr, buffers, cols, turn,
    GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
    OF_CODES: gl.constexpr = False,
):  # fmt: skip
    """The sums of a group's 64 rows of X with each part of Y, then the next turn of the buffers. A buffer holds DEPTH blocks of K.

    Tensor cores add up all of K: numbers of 16 bits in float32, and OF_CODES with fewer bits, which is fast accumulation.
    """
    x, y, full, empty = buffers
    DEEP: gl.constexpr = 32 if OF_CODES else 16
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y1, DEEP])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y2 if Y2 else Y1, DEEP])
    layout3: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y3 if Y3 else Y1, DEEP])
    one = gl.zeros([X_ROWS, Y1], gl.float32, layout1)
    two = gl.zeros([X_ROWS, Y2 if Y2 else Y1], gl.float32, layout2)
    three = gl.zeros([X_ROWS, Y3 if Y3 else Y1], gl.float32, layout3)
    for at in range(0, cols, DEPTH * BLOCK_K):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        for strip in gl.static_range(DEPTH):
            place = stage * DEPTH + strip
            mine = block_of(x.index(place * GROUPS + GROUP), X_ROWS, OF_CODES)
            one = warpgroup_mma(mine, block_of(y[0].index(place), Y1, OF_CODES).permute((1, 0)), one, is_async=True)
            if Y2:
                two = warpgroup_mma(mine, block_of(y[1].index(place), Y2, OF_CODES).permute((1, 0)), two, is_async=True)
            if Y3:
                three = warpgroup_mma(mine, block_of(y[2].index(place), Y3, OF_CODES).permute((1, 0)), three, is_async=True)
        # After this wait the products of the previous buffer are complete.
        if Y3:
            one, two, three = warpgroup_mma_wait(num_outstanding=3 * DEPTH, deps=(one, two, three))
        elif Y2:
            one, two = warpgroup_mma_wait(num_outstanding=2 * DEPTH, deps=(one, two))
        else:
            one = warpgroup_mma_wait(num_outstanding=DEPTH, deps=(one,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=at > 0)
        turn += 1
    if Y3:
        one, two, three = warpgroup_mma_wait(num_outstanding=0, deps=(one, two, three))
    elif Y2:
        one, two = warpgroup_mma_wait(num_outstanding=0, deps=(one, two))
    else:
        one = warpgroup_mma_wait(num_outstanding=0, deps=(one,))
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES))
    return one, two, three, turn


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, out, stagings, buffers, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr,
    Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """One group of warps: multiplies its 64 rows of X by the parts of Y."""
    items, rank, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    staging = stagings.index(GROUP)
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, col = tile_at(item, rank, rows, n_tiles, WORLD, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N)
        one, two, three, turn = products_of(GROUP, buffers, cols, turn, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)
        row += 0 if X_IS_B else GROUP * X_ROWS
        col += GROUP * X_ROWS if X_IS_B else 0
        store_part(out[0], one, staging, row, col, rows, X_IS_B, TARGET)
        if Y2:
            store_part(out[1], two, staging, row + (Y1 if X_IS_B else 0), col + (0 if X_IS_B else Y1), rows, X_IS_B, TARGET)
        if Y3:
            store_part(out[2], three, staging, row + (Y1 + Y2 if X_IS_B else 0), col + (0 if X_IS_B else Y1 + Y2), rows, X_IS_B, TARGET)
    tma.store_wait(0)
