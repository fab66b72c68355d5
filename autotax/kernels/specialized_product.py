"""The product of a rank's operands by warps with roles: a warp loads blocks, groups of four warps multiply. For Hopper.

`scaled_roles` says how groups multiply codes. SCALES "none" stands for operands of 16 bits, whose words are numbers. X is a block of A, also for few rows: rows of X that A lacks are not loaded, and what
results from them is not stored. A group has 64 rows. Two groups may share rows and take turns at the buffers: the adds of one
hide behind the products of the other. One of them then adds up the sums of both, by way of shared memory.

Tiles may also be computed in `splits` parts along K. The group that finishes the last part of its rows adds up all parts.
All sums have one order, so equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.roles import (
    BLOCK_K,
    MOST_PARTS,
    X_ROWS,
    allocate,
    layout_of,
    load_block,
    load_parts,
    padded,
    products_of,
)
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.product import grouped
from autotax.kernels.primitives import count, settle
from autotax.kernels.scaled_roles import CODES, OVERLAPPING, await_launch, multiply_tile, store_boxes, with_scales
from autotax.kernels.tiling import GROUP_ROWS, ProductTile, parts_of, staged_columns
from autotax.operators.inputs import DTYPES

GROUP_M = gl.constexpr(8)
"""Tiles below each other that are computed side by side, so that they share blocks of B."""
MOST_REGISTERS = 168
"""Registers per thread at the launch. The kernel redistributes them among the warps."""
LEAST_BOX = 8
"""Fewest rows of A that are loaded at a time: the swizzle of shared memory spans 8."""


@gluon.jit
def part_at(item, m, n, cols, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STRIPS: gl.constexpr):
    """The first row and column of the item-th part's tile, and its first and end columns of K, in words."""
    n_tiles = gl.cdiv(n, BLOCK_N)
    place = grouped(item // SPLITS, gl.cdiv(m, BLOCK_M), n_tiles, GROUP_M)
    steps = gl.cdiv(cols, STRIPS * BLOCK_K)
    part = item % SPLITS
    first = part * steps // SPLITS * (STRIPS * BLOCK_K)
    end = gl.minimum((part + 1) * steps // SPLITS * (STRIPS * BLOCK_K), cols)
    return place // n_tiles * BLOCK_M, place % n_tiles * BLOCK_N, first, end


@gluon.jit
def load_rows(view, row, at, loaded, x, stage, GROUPS: gl.constexpr):
    """Issues the loads of the rows of X that A may have."""
    HIGH: gl.constexpr = view.block_shape[0]
    for group in gl.static_range(GROUPS):
        place = x.index(stage * GROUPS + group)
        load_block(view, [row + group * X_ROWS, at], loaded, place if HIGH == X_ROWS else place.slice(0, HIGH, 0))


@gluon.jit
def load_blocks(
    a, b, buffers, share,
    SPLITS: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
):  # fmt: skip
    """The loader. It waits only for empty buffers."""
    x, y, full, empty = buffers
    items, m, n, cols = share
    BLOCK_M: gl.constexpr = GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = Y1 + Y2 + Y3
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, col, first, end = part_at(item, m, n, cols, SPLITS, BLOCK_M, BLOCK_N, STRIPS)
        for at in range(first, end, BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, (GROUPS * a.block_shape[0] + BLOCK_N) * BLOCK_K * 2)
            load_parts(b, col, at, loaded, y, stage, Y1, Y2, Y3)
            load_rows(a, row, at, loaded, x, stage, GROUPS)
            turn += 1


@gluon.jit
def place_in(part, FIRST: gl.constexpr):
    """Where the elements of a part of a tile lie behind FIRST others."""
    layout: gl.constexpr = part.type.layout
    r = gl.arange(0, X_ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, layout))
    return FIRST + r[:, None] * part.shape[1] + c[None, :]


@gluon.jit
def sum_of_parts(partials, like, FIRST: gl.constexpr, SPLITS: gl.constexpr, STRIDE: gl.constexpr):
    """The sum of the parts of a tile in their order. Other programs may have just written them, so loads bypass the L1."""
    place = place_in(like, FIRST)
    total = gl.load(partials + place, cache_modifier=".cg")
    for part in gl.static_range(1, SPLITS):
        total += gl.load(partials + part * STRIDE + place, cache_modifier=".cg")
    return total


@gluon.jit
def sum_of_tile(
    item, turn, phase, GROUP: gl.constexpr, TURN: gl.constexpr, of_all, buffers, sums, share,
    SCALES: gl.constexpr, SPLITS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr,
    STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """A group's 64 rows of the item-th part's tile, scaled, in float32: their parts, whether they are complete, their first row and
    column, and the next buffer. They are complete for the first of the groups with these rows that finishes the last part along K.

    `of_all` are the scales of A, their strides, those of B, and the workspaces. `sums` is the place of `place_of_sums`, in which the
    second of two groups leaves its sums for the first, and two barriers: sums lie there, and they were taken.
    """
    scales_a, stride_m, stride_g, scales_b, partials, finished = of_all
    _, m, n, cols = share
    places, left, taken = sums
    BLOCK_N: gl.constexpr = Y1 + Y2 + Y3
    PART: gl.constexpr = X_ROWS * BLOCK_N
    row, col, first, end = part_at(item, m, n, cols, SPLITS, GROUPS * X_ROWS, BLOCK_N, STRIPS)
    row += GROUP * X_ROWS
    if SCALES == "none":
        gl.static_assert(Y2 == 0 and TURNS == 1)
        one, two, _, turn = products_of(GROUP, buffers, end - first, turn, GROUPS, Y1, 0, 0, STAGES, 1)
        three = two
    else:
        side: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y1, 32]))
        r = row + gl.arange(0, X_ROWS, layout=side)
        inside = r < m
        of_a = scales_a + gl.where(inside, r, 0).to(gl.int64) * stride_m
        strip = first // BLOCK_K
        of_b = scales_b + col // CODES * gl.cdiv(2 * cols, CODES) + strip
        one, two, three, _ = multiply_tile(
            GROUP, buffers, end - first, turn, of_a + strip * stride_g, stride_g, of_b,
            SCALES, False, GROUPS, Y1, Y2, Y3, STAGES, 1, STRIPS, False, TURN, TURNS,
        )  # fmt: skip
        turn += gl.cdiv(end - first, BLOCK_K)
    complete = item >= 0
    if TURN > 0:
        mbarrier.wait(taken, phase ^ 1)
        places[0].store(one)
        if Y2:
            places[1].store(two)
        if Y3:
            places[2].store(three)
        settle(TARGET)
        mbarrier.arrive(left)
        complete = item < 0
    else:
        if TURNS > 1:
            mbarrier.wait(left, phase)
            one += places[0].load(one.type.layout)
            if Y2:
                two += places[1].load(two.type.layout)
            if Y3:
                three += places[2].load(three.type.layout)
            settle(TARGET)
            mbarrier.arrive(taken)
        if SPLITS > 1:
            tile = item // SPLITS * GROUPS + GROUP
            parts = partials + gl.cast(tile, gl.int64) * (SPLITS * PART)
            mine = parts + item % SPLITS * PART
            gl.store(mine + place_in(one, 0), one)
            if Y2:
                gl.store(mine + place_in(two, X_ROWS * Y1), two)
            if Y3:
                gl.store(mine + place_in(three, X_ROWS * (Y1 + Y2)), three)
            complete = count(finished + tile, TARGET, "gpu") == SPLITS - 1
            if complete:
                gl.store(finished + tile, 0)
                one = sum_of_parts(parts, one, 0, SPLITS, PART)
                if Y2:
                    two = sum_of_parts(parts, two, X_ROWS * Y1, SPLITS, PART)
                if Y3:
                    three = sum_of_parts(parts, three, X_ROWS * (Y1 + Y2), SPLITS, PART)
        if SCALES != "none":
            if complete:
                one = with_scales(one, of_a, inside, scales_b, col, n, SCALES, False)
                if Y2:
                    two = with_scales(two, of_a, inside, scales_b, col + Y1, n, SCALES, False)
                if Y3:
                    three = with_scales(three, of_a, inside, scales_b, col + Y1 + Y2, n, SCALES, False)
    return one, two, three, complete, row, col, turn


@gluon.jit
def multiply(
    GROUP: gl.constexpr, TURN: gl.constexpr, of_all, out, stagings, buffers, sums, share,
    SCALES: gl.constexpr, SPLITS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr,
    STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """A group: multiplies its 64 rows of each tile, and stores those that are complete."""
    items, m, _, _ = share
    staging = stagings.index(GROUP)
    turn = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        one, two, three, complete, row, col, turn = sum_of_tile(
            item, turn, phase, GROUP, TURN, of_all, buffers, sums, share,
            SCALES, SPLITS, GROUPS, TURNS, Y1, Y2, Y3, STAGES, STRIPS, TARGET,
        )  # fmt: skip
        if TURN == 0:
            if complete:
                store_boxes(out[0], one, staging, row, col, m, False, TARGET)
                if Y2:
                    store_boxes(out[1], two, staging, row, col + Y1, m, False, TARGET)
                if Y3:
                    store_boxes(out[2], three, staging, row, col + Y1 + Y2, m, False, TARGET)
        phase ^= 1
    tma.store_wait(0)


@gluon.jit
def place_of_sums(Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr):
    """Shared memory for the sums of a group, one buffer a part of Y, with two barriers; see `sum_of_tile`."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    one = gl.allocate_shared_memory(gl.float32, [X_ROWS, Y1], layout)
    two = one
    three = one
    if Y2:
        two = gl.allocate_shared_memory(gl.float32, [X_ROWS, Y2], layout)
    if Y3:
        three = gl.allocate_shared_memory(gl.float32, [X_ROWS, Y3], layout)
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(left, count=1)
    mbarrier.init(taken, count=1)
    return (one, two, three), left, taken


@gluon.jit(do_not_specialize=["m"])
def specialized_product_kernel(
    a, b1, b2, b3, out1, out2, out3, scales_a, stride_m, stride_g, scales_b, partials, finished, m, n, cols,
    SCALES: gl.constexpr, SPLITS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr,
    STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """`a` [m, cols], `b` [n, cols] and `out` [1, m, n] are TMA descriptors of the boxes of a tile; `cols` are words of 16 bits."""
    await_launch()
    b = (b1, b2, b3)
    out = (out1, out2, out3)
    items = gl.cdiv(m, GROUPS * X_ROWS) * gl.cdiv(n, Y1 + Y2 + Y3) * SPLITS
    share = (items, m, n, cols)
    of_all = (scales_a, stride_m, stride_g, scales_b, partials, finished)
    buffers, stagings = allocate(a, out1, 1, GROUPS, Y1, Y2, Y3, STAGES, 1)
    sums = (None, None, None)
    if TURNS > 1:
        sums = place_of_sums(Y1, Y2, Y3)
    fence_async_shared()
    gl.static_assert(GROUPS * TURNS <= 2)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS * TURNS == 1:
        gl.warp_specialize(
            [
                (multiply, (0, 0, of_all, out, stagings, buffers, sums, share, SCALES, SPLITS, GROUPS, TURNS, Y1, Y2, Y3, STAGES, STRIPS, TARGET)),
                (load_blocks, (a, b, buffers, share, SPLITS, GROUPS, Y1, Y2, Y3, STAGES, STRIPS)),
            ],
            [1],
            [88],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (0, 0, of_all, out, stagings, buffers, sums, share, SCALES, SPLITS, GROUPS, TURNS, Y1, Y2, Y3, STAGES, STRIPS, TARGET)),
                (multiply, (1 // TURNS, 1 % TURNS, of_all, out, stagings, buffers, sums, share, SCALES, SPLITS, GROUPS, TURNS, Y1, Y2, Y3, STAGES, STRIPS, TARGET)),
                (load_blocks, (a, b, buffers, share, SPLITS, GROUPS, Y1, Y2, Y3, STAGES, STRIPS)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


class SpecializedProduct:
    """Products of A [., k] and B [n, k] for one tile, with workspaces for `rows` rows of A or fewer."""

    def __init__(self, tile: ProductTile, splits: int, problem: Any, rows: int, context: Context) -> None:
        self.context, self.problem, self.tile, self.splits, self.word = context, problem, tile, splits, problem.out_dtype
        self.parts = parts_of(tile.columns)
        staged = staged_columns(tile.columns, tile.stages)
        self.box_a = [min(GROUP_ROWS, max(LEAST_BOX, power_of_two(rows))), tiling.BLOCK_K]
        self.boxes_b = [[part, tiling.BLOCK_K] for part in self.parts]
        self.boxes_out = [[1, GROUP_ROWS, min(part, staged)] for part in self.parts]
        tiles = ceil_div(rows, tile.rows) * ceil_div(problem.n, tile.columns) if splits > 1 else 0
        self.partials = context.empty((max(1, tiles * splits * tile.rows * tile.columns),), torch.float32)
        self.finished = context.empty((max(1, tiles * tile.groups),), torch.int32).zero_()
        self.constants = {
            "SCALES": problem.scales, "SPLITS": splits, "GROUPS": tile.groups, "TURNS": tile.turns,
            **{f"Y{number}": part for number, part in enumerate(padded(self.parts, MOST_PARTS, 0), 1)},
            "STAGES": tile.stages, "STRIPS": tile.strips, "num_warps": 4, "maxnreg": MOST_REGISTERS,
        } | OVERLAPPING  # fmt: skip

    def view(self, matrix: Tensor, box: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrix, box, layout_of(tuple(box), self.word))

    def grid(self, rows: int) -> tuple[int]:
        """Programs for A of so many rows: all are resident, one per processor."""
        items = ceil_div(rows, self.tile.rows) * ceil_div(self.problem.n, self.tile.columns) * self.splits
        return (min(items, self.context.processors),)

    def arguments(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor | None, out: Tensor) -> tuple[Any, ...]:
        """The arguments of the kernel for codes with their scales, or for operands of 16 bits."""
        word = DTYPES[self.word]
        strides = scales_a.stride() if scales_a is not None and scales_a.dim() == 2 else (0, 0)
        return (
            self.view(a.view(word), self.box_a),
            *padded([self.view(b.view(word), box) for box in self.boxes_b], MOST_PARTS, None),
            *padded([self.view(out[None], box) for box in self.boxes_out], MOST_PARTS, None),
            scales_a, *strides, scales_b, self.partials, self.finished, len(a), self.problem.n, self.problem.k * a.itemsize // 2,
        )  # fmt: skip

    def __call__(self, a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """out [m, n] = A [m, k] @ B [n, k].T, for codes with their scales."""
        self.context.launch(
            specialized_product_kernel, self.grid(len(a)), *self.arguments(a, scales_a, b, scales_b, out), **self.constants
        )
