"""The GEMM of every fused All-Gather + GEMM variant: a persistent loop over output tiles that waits for the rows of A it needs.

Tiles are assigned to programs statically or taken from a counter. The tiles of this rank's shard come first.

A tile of C [m, n] is block_m x block_n. With `shard="m"` (SHARD_K false) a tile needs the rows of one source rank.
With ALL this rank's shard also lies in the inbox, and a tile may need rows of several sources. With `shard="k"` a
tile needs its rows from every rank and accumulates one K segment per source.

Waiting happens inside the pipelined K loop. Prefetched loads must not pass the wait, so their addresses depend on the
value that the wait returned.

Tiles that would not fill a wave of programs are cut into SPLITS parts along K. Each part stores its sum in `partials`. The
program that finishes last adds up all parts in a fixed order, so results do not depend on which program that is.

If the number of columns of a tile is no power of two (320), two products side by side (256 and 64 wide) share the rows of A.
Accumulators and views of B are tuples of one or two items. Such tiles can fill one wave of processors where narrower tiles would
need two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.context import Context
from autotax.kernels.primitives import EPOCH, NEXT_TILE, arithmetic, count, dot, translate, wait
from autotax.operators.all_gather_gemm import AllGatherGemm

AMD_OPTIONS = ("matrix_instr_nonkdim", "waves_per_eu", "kpack")
"""Compile options that only Triton for AMD knows."""


@dataclass(frozen=True)
class TileOptions:
    """The host side of the GEMM: its compile-time constants and the views of its operands."""

    block_m: int
    block_n: int
    block_k: int
    tma: bool
    constants: dict[str, Any]
    """Constexprs and compile options of a kernel that calls `gather_gemm`."""

    @classmethod
    def of(cls, config: Config) -> TileOptions:
        tma = config["loads"] == "tma"
        constants = {
            "INTERLEAVED": config.values.get("order") == "interleaved",
            "GROUP_M": config["group_m"],
            "SPLITS": config.values.get("splits", 1),
            "BLOCK_M": config["block_m"],
            "BLOCK_N": config["block_n"],
            "BLOCK_K": config["block_k"],
            "TMA": tma,
            "num_warps": config["num_warps"],
            "num_stages": config["num_stages"],
        } | {name: config[name] for name in AMD_OPTIONS if name in config.values}
        return cls(config["block_m"], config["block_n"], config["block_k"], tma, constants)

    def parts(self, problem: AllGatherGemm, config: Config, context: Context) -> tuple[Tensor, Tensor]:
        """Allocates `partials` and `finished` of `gather_gemm`, for this many rows or fewer."""
        splits = config["splits"]
        cut = 0 if splits == 1 else min(context.processors - 1, ceil_div(problem.n, self.block_n) * self._rows_of_tiles(problem, config))
        partials = context.empty((max(1, cut * splits), self.block_m, self.block_n), torch.float32)
        return partials, context.empty((max(1, cut),), torch.int32).zero_()

    def _rows_of_tiles(self, problem: AllGatherGemm, config: Config) -> int:
        if problem.shard == "k":
            return ceil_div(problem.m, self.block_m)
        if config.values.get("across"):
            return ceil_div(problem.world_size * problem.shard_rows, self.block_m)
        return problem.world_size * ceil_div(problem.shard_rows, self.block_m)

    def view_a(self, matrix: Tensor) -> Any:
        """Returns the argument of `load_tile` for blocks of A: a TMA descriptor, or the tensor itself."""
        return TensorDescriptor.from_tensor(matrix, [self.block_m, self.block_k]) if self.tma else matrix

    def view_b(self, matrix: Tensor) -> Any:
        """Returns the argument of `load_tile` for blocks of B."""
        return TensorDescriptor.from_tensor(matrix, [self.block_n, self.block_k]) if self.tma else matrix


def element_alignment(problem: AllGatherGemm) -> int:
    """Every row of a shard is aligned to this many elements, at most 16. Vector accesses rely on it."""
    return math.gcd(problem.shard_cols, 16)


@triton.constexpr_function
def wide(block_n):
    """Columns of a tile's first product: the largest power of two."""
    return 1 << (block_n.bit_length() - 1)


@triton.constexpr_function
def narrow(block_n):
    """Columns of a tile's second product: a power of two, or zero. Few tiles have a second product."""
    return block_n - (1 << (block_n.bit_length() - 1))


def views_of_b(tiles: TileOptions, matrix: Tensor) -> tuple[Any, Any]:
    """The views of B for the first and second product of a tile, or None. A launch accepts no TMA descriptor inside a tuple."""
    if tiles.block_n & (tiles.block_n - 1) == 0:  # fast path for eager calls
        return tiles.view_b(matrix), None
    first, second = (replace(tiles, block_n=part(tiles.block_n)).view_b(matrix) for part in (wide, narrow))
    return first, second


@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The accumulators of a tile."""
    first = tl.zeros([BLOCK_M, wide(BLOCK_N)], tl.float32)
    if narrow(BLOCK_N) == 0:
        return (first,)
    else:  # noqa: RET505 - decided at compile time; without `else` both arms would be compiled
        return first, tl.zeros([BLOCK_M, narrow(BLOCK_N)], tl.float32)


@triton.jit
def load_tile(
    view, row, col, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Loads ROWS x COLS elements of a row-major matrix, zero outside. `view` is a TMA descriptor of such blocks, or a
    pointer. Columns and strides are multiples of ALIGNED elements.
    """
    if TMA:
        tile = view.load([row, col])
    else:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        size: tl.constexpr = view.dtype.element_ty.primitive_bitwidth // 8
        # The compiler knows no alignment of an address translated from an integer: loads would be two bytes wide.
        addresses = tl.multiple_of(view + r.to(tl.int64)[:, None] * stride + c[None, :], (size, ALIGNED * size))
        tile = tl.load(addresses, mask=inside, other=0.0)
    return tile


@triton.jit
def multiplied(
    acc, x, b, col, at, n, end, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc + x @ B[col : col + BLOCK_N, at : at + BLOCK_K].T for B [n, k]; columns from `end` on count as zero."""
    y = load_tile(b[0], col, at, n, end, k, wide(BLOCK_N), BLOCK_K, TMA, ALIGNED)
    first = dot(x, y.T, acc[0], TARGET)
    if narrow(BLOCK_N) == 0:
        return (first,)
    else:  # noqa: RET505 - as above
        z = load_tile(b[1], col + wide(BLOCK_N), at, n, end, k, narrow(BLOCK_N), BLOCK_K, TMA, ALIGNED)
        return first, dot(x, z.T, acc[1], TARGET)


@triton.jit
def store_block(out, acc, row, col, row_end, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    r = row + tl.arange(0, BLOCK_M)
    c = col + tl.arange(0, BLOCK_N)
    inside = (r < row_end)[:, None] & (c < n)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * n + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(out, acc, row, col, row_end, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    store_block(out, acc[0], row, col, row_end, n, BLOCK_M, wide(BLOCK_N))
    if narrow(BLOCK_N) != 0:
        store_block(out, acc[1], row, col + wide(BLOCK_N), row_end, n, BLOCK_M, narrow(BLOCK_N))


K_ALIGNMENT = tl.constexpr(128)
"""K groups are aligned to this many columns: a multiple of every BLOCK_K."""
NOWHERE = tl.constexpr(1 << 30)
"""A row index beyond every matrix: loads from this row return zeros."""
SUM_ROWS = tl.constexpr(128)
"""Rows, over all parts of a tile together, that are loaded at a time when parts are added up. Registers limit this number."""

grouped = arithmetic(tiling.grouped)
remapped = arithmetic(tiling.remapped)
remote_row = arithmetic(tiling.remote_row)
whole_tiles = arithmetic(tiling.whole_tiles)
tile_of = arithmetic(tiling.tile_of)
first_block = arithmetic(tiling.first_block)
last_block = arithmetic(tiling.last_block)
dealt_out = arithmetic(tiling.dealt_out)
pieces = arithmetic(tiling.pieces)


@triton.jit
def next_item(control):
    """Takes the next work item that no other program of this call has taken; returns its number."""
    return tl.atomic_add(control + NEXT_TILE, 1, sem="relaxed", scope="gpu")


@triton.jit
def next_share(control, dealt, items):
    """Takes a work item that was not assigned statically. Returns its number, not below `items` if none is left, and that + 1."""
    item = items
    if dealt < items:
        item = dealt + next_item(control)
    return item, item + 1


@triton.jit
def first_share(worker, control, dealt, items):
    """Returns a program's first work item and the end of its share. The static share is every n-th item from `worker` on, for n
    workers. Without a static share the item comes from `next_share`. `worker` is negative for a program that communicated first.
    """
    item, share_end = worker, dealt
    if (worker < 0) | (worker >= dealt):
        item, share_end = next_share(control, dealt, items)
    return item, share_end


@triton.jit
def columns_of(group, cols, K_GROUPS: tl.constexpr):
    """The first column of a K group of a shard, and the column after its last. The last group may be shorter."""
    span = tl.cdiv(cols, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT
    start = group * span
    return start, tl.minimum(start + span, cols)


@triton.jit
def product(
    acc, a, row, a_rows, a_cols, start, end, b, col, n, k0, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc + A[row:, start:end] @ B[col:, k0 + start:k0 + end].T for row-major A [a_rows, a_cols] and B [n, k].

    `start` is a multiple of BLOCK_K, and so is `end` unless it is a_cols.
    """
    for at in range(start, end, BLOCK_K):
        x = load_tile(a, row, at, a_rows, a_cols, a_cols, BLOCK_M, BLOCK_K, TMA_A, ALIGNED)
        acc = multiplied(acc, x, b, col, k0 + at, n, k0 + a_cols, k, BLOCK_N, BLOCK_K, TMA_B, ALIGNED, TARGET)
    return acc


@triton.jit
def wait_rows(flags, first, last, chunks, goal, control, WORLD: tl.constexpr, TARGET: tl.constexpr):
    """Waits for flags first ... last of a K group. Returns 0, or NOWHERE if one never arrived."""
    late = 0
    for index in tl.range(first, last + 1, num_stages=1):
        seen = wait(flags + index, goal, (index // chunks) % WORLD, index, control, TARGET)
        late = tl.where(seen - goal < 0, NOWHERE, late)
    return late


@triton.jit
def awaited_product(
    acc, inbox, source, row, row_end, start, end, b, col, n, k0, k, flags, control, rows, cols, epoch, signals,
    WORLD: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`product` for rows row ... row_end - 1 in the inbox, from the shard of `source` on. Waits for each K group first."""
    chunks = tl.cdiv(rows, CHUNK)
    first = (source + row // rows) * chunks + (row % rows) // CHUNK
    last = (source + (row_end - 1) // rows) * chunks + ((row_end - 1) % rows) // CHUNK
    span = tl.cdiv(cols, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT
    slot = epoch & (SLOTS - 1)  # not %: it is negative once the epoch has wrapped around
    place = (slot * WORLD + source) * rows + row
    next_group = start
    for at in range(start, end, BLOCK_K):
        if at >= next_group:
            group = at // span
            place = (slot * WORLD + source) * rows + row + wait_rows(
                flags, group * WORLD * chunks + first, group * WORLD * chunks + last, chunks, epoch * signals, control, WORLD, TARGET
            )
            next_group = (group + 1) * span
        x = load_tile(inbox, place, at, SLOTS * WORLD * rows, cols, cols, BLOCK_M, BLOCK_K, TMA, ALIGNED)
        acc = multiplied(acc, x, b, col, k0 + at, n, k0 + cols, k, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET)
    return acc


@triton.jit
def add_parts(out, parts, row, col, row_end, n, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores the sum of SPLITS parts [BLOCK_M, BLOCK_N] of a tile, which other programs have just written.

    On NVIDIA `.cg` bypasses the L1. On AMD it is only a hint (`sc0 nt`) that the data is read once. There `count` has
    invalidated stale lines in the L1 and in this die's L2.
    """
    most: tl.constexpr = SUM_ROWS // (2 if SPLITS == 2 else (4 if SPLITS <= 4 else 8))
    rows: tl.constexpr = most if most < BLOCK_M else BLOCK_M
    for first in tl.range(0, BLOCK_M, rows, num_stages=1):
        within = (first + tl.arange(0, rows))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total = tl.load(parts + within, cache_modifier=".cg")
        for part in tl.static_range(1, SPLITS):
            total += tl.load(parts + part * BLOCK_M * BLOCK_N + within, cache_modifier=".cg")
        store_block(out, total, row + first, col, row_end, n, rows, BLOCK_N)


@triton.jit
def finish(
    out, acc, partials, finished, item, whole, row, col, row_end, n,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Stores a whole tile. Of a cut tile it stores the part, and the sum if all other parts are complete."""
    if SPLITS == 1:  # noqa: SIM114 - decided at compile time; a flattened loop must not contain the other arms
        store_tile(out, acc, row, col, row_end, n, BLOCK_M, BLOCK_N)
    elif item < whole:
        store_tile(out, acc, row, col, row_end, n, BLOCK_M, BLOCK_N)
    else:
        tile = (item - whole) // SPLITS
        parts = partials + tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N
        within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(parts + (item - whole) % SPLITS * BLOCK_M * BLOCK_N + within, acc[0])  # cut tiles have one product
        if count(finished + tile, TARGET, "gpu") == SPLITS - 1:
            tl.store(finished + tile, 0)
            add_parts(out, parts, row, col, row_end, n, SPLITS, BLOCK_M, BLOCK_N)


@triton.jit
def gather_rows(
    own, inbox, b, out, partials, finished, bases, flags, control, rank, m, n, rows, cols, signals,
    WORLD: tl.constexpr, REMOTE: tl.constexpr, ALL: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    K_GROUPS: tl.constexpr, COMM: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr, DIES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes tiles of C until none is left, for A sharded along M: this rank's rows first, then the rows of the other ranks.

    There are two loops instead of one with a branch, so that the two pipelines can use the same shared memory. With
    ALL there is one loop, over the rows of all shards. For whole tiles (SPLITS 1) each loop is flattened with its K
    loop, so that the pipeline stays full from tile to tile. Tiles that are not assigned statically are computed one
    at a time. With DIES > 1 each die computes neighbouring tiles of a wave; this requires SPLITS 1.
    """
    epoch = tl.load(control + EPOCH)
    height = WORLD * rows if ALL else rows
    m_tiles = tl.cdiv(height, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    tiles = m_tiles * n_tiles * (1 if ALL else WORLD)
    programs = tl.num_programs(0)
    whole = whole_tiles(tiles, programs, SPLITS)
    items = pieces(tiles, whole, SPLITS)
    mine = 0 if ALL else m_tiles * n_tiles
    mine_end = pieces(mine, whole, SPLITS)
    dealt = dealt_out(items, programs, COMM, SPLITS)
    step = programs - COMM
    # With two products per tile, flattening costs more time than the closed gaps between tiles save.
    flat: tl.constexpr = narrow(BLOCK_N) == 0
    blocks = tl.cdiv(cols, BLOCK_K)
    item, share_end = first_share(tl.program_id(0) - COMM, control, dealt, items)
    if not ALL:
        while item < mine_end:
            stop = tl.minimum(share_end, mine_end)
            for piece in tl.range(item, stop, step, flatten=flat):
                tile = tile_of(piece, whole, SPLITS)
                if DIES > 1:
                    tile = remapped(tile, 0, mine, step, DIES)
                place = grouped(tile, m_tiles, n_tiles, GROUP_M)
                row = (place // n_tiles) * BLOCK_M
                col = (place % n_tiles) * BLOCK_N
                start, end = 0, cols
                if SPLITS > 1:
                    start = first_block(piece, whole, SPLITS, blocks) * BLOCK_K
                    end = tl.minimum(last_block(piece, whole, SPLITS, blocks) * BLOCK_K, cols)
                acc = zeros(BLOCK_M, BLOCK_N)
                acc = product(
                    acc, own, row, rows, cols, start, end, b, col, n, 0, cols,
                    BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, ALIGNED, TARGET,
                )  # fmt: skip
                finish(
                    out, acc, partials, finished, piece, whole, rank * rows + row, col, tl.minimum((rank + 1) * rows, m), n,
                    SPLITS, BLOCK_M, BLOCK_N, TARGET,
                )  # fmt: skip
            item += tl.cdiv(stop - item, step) * step
            if item >= share_end:
                item, share_end = next_share(control, dealt, items)
    while item < items:
        for piece in tl.range(item, share_end, step, flatten=flat):
            tile = tile_of(piece, whole, SPLITS)
            if DIES > 1:
                tile = remapped(tile, mine, tiles, step, DIES)
            place = grouped(tile - mine, (m_tiles if ALL else (WORLD - 1) * m_tiles), n_tiles, GROUP_M)
            position = place // n_tiles if ALL else remote_row(place // n_tiles, m_tiles, WORLD, INTERLEAVED)
            source = 0 if ALL else (rank + WORLD - position // m_tiles) % WORLD
            row = (position % m_tiles) * BLOCK_M
            col = (place % n_tiles) * BLOCK_N
            start, end = 0, cols
            if SPLITS > 1:
                start = first_block(piece, whole, SPLITS, blocks) * BLOCK_K
                end = tl.minimum(last_block(piece, whole, SPLITS, blocks) * BLOCK_K, cols)
            acc = zeros(BLOCK_M, BLOCK_N)
            if REMOTE:
                seen = wait(flags + source, epoch * signals, source, source, control, TARGET)
                awaited_row = tl.where(seen - epoch * signals < 0, NOWHERE, row)  # prefetched loads must not pass the wait
                shard = translate(inbox + (epoch & (SLOTS - 1)).to(tl.int64) * rows * cols, bases, rank, source)
                acc = product(
                    acc, shard, awaited_row, rows, cols, start, end, b, col, n, 0, cols,
                    BLOCK_M, BLOCK_N, BLOCK_K, False, TMA, ALIGNED, TARGET,
                )  # fmt: skip
            else:
                acc = awaited_product(
                    acc, inbox, source, row, tl.minimum(row + BLOCK_M, height), start, end, b, col, n, 0, cols,
                    flags, control, rows, cols, epoch, signals,
                    WORLD, SLOTS, CHUNK, K_GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
                )  # fmt: skip
            row_end = tl.minimum(source * rows + height, m)
            finish(out, acc, partials, finished, piece, whole, source * rows + row, col, row_end, n, SPLITS, BLOCK_M, BLOCK_N, TARGET)
        item, share_end = next_share(control, dealt, items)


@triton.jit
def gather_columns(
    own, inbox, b, out, partials, finished, bases, flags, control, rank, m, n, cols, signals,
    WORLD: tl.constexpr, REMOTE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, K_GROUPS: tl.constexpr,
    GROUP_M: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes tiles of C until none is left, for A sharded along K: each tile adds this rank's segment first."""
    epoch = tl.load(control + EPOCH)
    m_tiles = tl.cdiv(m, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    k = WORLD * cols
    whole = whole_tiles(m_tiles * n_tiles, tl.num_programs(0), SPLITS)
    blocks = tl.cdiv(cols, BLOCK_K)  # per segment; this rank's segment comes first, then the others in the order of arrival
    item = next_item(control)
    tile = tile_of(item, whole, SPLITS)
    while tile < m_tiles * n_tiles:
        place = grouped(tile, m_tiles, n_tiles, GROUP_M)
        row = (place // n_tiles) * BLOCK_M
        col = (place % n_tiles) * BLOCK_N
        first = first_block(item, whole, SPLITS, WORLD * blocks)
        last = last_block(item, whole, SPLITS, WORLD * blocks)
        acc = zeros(BLOCK_M, BLOCK_N)
        start = tl.minimum(first, blocks) * BLOCK_K
        end = tl.minimum(tl.minimum(last, blocks) * BLOCK_K, cols)
        acc = product(acc, own, row, m, cols, start, end, b, col, n, rank * cols, k, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, ALIGNED, TARGET)
        for step in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - step) % WORLD
            start = tl.minimum(tl.maximum(first - step * blocks, 0), blocks) * BLOCK_K
            end = tl.minimum(tl.minimum(tl.maximum(last - step * blocks, 0), blocks) * BLOCK_K, cols)
            if REMOTE:
                wait(flags + source, epoch * signals, source, source, control, TARGET)
                shard = translate(inbox + (epoch & (SLOTS - 1)).to(tl.int64) * m * cols, bases, rank, source)
                acc = product(
                    acc, shard, row, m, cols, start, end, b, col, n, source * cols, k,
                    BLOCK_M, BLOCK_N, BLOCK_K, False, TMA, ALIGNED, TARGET,
                )  # fmt: skip
            else:
                acc = awaited_product(
                    acc, inbox, source, row, tl.minimum(row + BLOCK_M, m), start, end, b, col, n, source * cols, k,
                    flags, control, m, cols, epoch, signals,
                    WORLD, SLOTS, CHUNK, K_GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
                )  # fmt: skip
        finish(out, acc, partials, finished, item, whole, row, col, m, n, SPLITS, BLOCK_M, BLOCK_N, TARGET)
        item = next_item(control)
        tile = tile_of(item, whole, SPLITS)


@triton.jit
def gather_gemm(
    own, inbox, b, out, partials, finished, bases, flags, control, rank, m, n, rows, cols, signals,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, REMOTE: tl.constexpr, ALL: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr, K_GROUPS: tl.constexpr, COMM: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr, DIES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes a program's part of C = gather(A) @ B.T.

    This rank's shard [rows, cols] is read through `own`. The other shards, and with ALL also this rank's, lie in
    `inbox` [SLOTS, WORLD, rows, cols]. With REMOTE each shard lies in the inbox [SLOTS, rows, cols] of its owner, and
    `inbox` is a plain pointer. `b` has the views of B (see `views_of_b`).

    Flags are [K_GROUPS, WORLD, chunks], with REMOTE [WORLD]. The data of a flag has arrived after `signals` signals per call.
    With SPLITS > 1 the cut tiles, fewer than there are programs, use `partials` float32 [tiles, SPLITS, BLOCK_M, BLOCK_N] and
    `finished` int32 [tiles]. `finished` is zero between calls. With SPLITS 1 neither is touched.
    """
    if SHARD_K:
        gather_columns(
            own, inbox, b, out, partials, finished, bases, flags, control, rank, m, n, cols, signals,
            WORLD, REMOTE, SLOTS, CHUNK, K_GROUPS, GROUP_M, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
        )  # fmt: skip
    else:
        gather_rows(
            own, inbox, b, out, partials, finished, bases, flags, control, rank, m, n, rows, cols, signals,
            WORLD, REMOTE, ALL, SLOTS, CHUNK, K_GROUPS, COMM, INTERLEAVED, GROUP_M, DIES, SPLITS,
            BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED, TARGET,
        )  # fmt: skip
