"""words, for few rows: partial sums travel as 8-byte words that carry the number of their call, without fences and flags.

A word has four bytes of data in its low half: one float32, or two neighbouring columns of 16 bits. Its high half is the number of
the call. One store writes it. The reader loads its words until all have this call's number. `shots` selects the trips:

- `one`: every rank sends its partial sum to all ranks, and each adds up everything. One trip.
- `two`: each rank adds up some of the column tiles and sends the sums to all. Two trips, fewer bytes.

A scattered output takes one trip, to the owner of each row. Programs send all their tiles before they wait. See
docs/memory-model.md for why no stale word matches and none is replaced too early. Rows of padding are sent too, so every rank
waits for every other rank, directly or through an owner that did.

The whole program votes on whether all words have arrived: `flash_decode.exchange` gives the reason. The values that are used are
those that passed the vote. Each turn loads every word anew and adds it up, and the sum of the last turn is the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_gather_gemm.gemm import TileOptions
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.product import (
    first_block,
    grouped,
    last_block,
    last_of_parts,
    multiplied,
    part_of_tile,
    pieces,
    rounded,
    tile_of,
    whole_tiles,
)
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, addends, with_addends
from autotax.kernels.primitives import EPOCH, ERROR, LIMIT, leave, load_whole, note_missing, store_whole
from autotax.kernels.scaled_product import Tile, scaled_sum, with_scales
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.scaled import plain

PIECE_WORDS = 1024
"""Words that a program polls together: at least as many as it has threads, which may load a smaller tile twice."""


@triton.jit
def packed(block, epoch, TWO: tl.constexpr, PAYLOAD: tl.constexpr, TARGET: tl.constexpr):
    """Packs a float32 block [rows, columns] into words: one per column, or with TWO one per two neighbouring columns."""
    if TWO:
        short = rounded(block, PAYLOAD, TARGET).to(tl.int16, bitcast=True)
        low, high = tl.split(tl.reshape(short, [block.shape[0], block.shape[1] // 2, 2]))
        data = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        data = block.to(tl.int32, bitcast=True)
    return (epoch.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def column_of(words, HIGH: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr):
    """Returns, as float32, the column that each word holds. If a word holds two columns, HIGH selects the second."""
    bits = words.to(tl.int32)
    if TWO:
        return (bits >> (16 if HIGH else 0)).to(tl.int16).to(PAYLOAD, bitcast=True).to(tl.float32)
    else:  # noqa: RET505 - decided at compile time
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def anywhere(missing, TARGET: tl.constexpr):
    """Whether an element of `missing` is not zero. The result is the same in every thread."""
    any_missing = tl.max(missing)
    if TARGET == "cuda":
        any_missing = tl.inline_asm_elementwise(
            "{.reg .pred a, b; setp.ne.s32 a, $1, 0; bar.red.or.pred b, 0, a; selp.s32 $0, 1, 0, b;}",
            "=r,r", [any_missing], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return any_missing


@triton.jit
def look(
    addresses, stride, inside, safe, epoch, SOURCES: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """Loads the words of SOURCES partial sums, `stride` words apart, and adds them up in their order.

    Returns how many sources are missing per element, and the sums of the first and of the second columns.
    """
    missing = tl.zeros(addresses.shape, tl.int32)
    low = tl.zeros(addresses.shape, tl.float32)
    high = tl.zeros(addresses.shape, tl.float32)
    for source in tl.static_range(SOURCES):
        words = load_whole(addresses + source * stride, inside, safe, 0, TARGET)
        missing += (inside & ((words >> 32).to(tl.int32) != epoch)).to(tl.int32)
        low += column_of(words, False, TWO, PAYLOAD)
        if TWO:
            high += column_of(words, True, TWO, PAYLOAD)
    return missing, low, high


@triton.jit
def await_sum(
    addresses, stride, inside, safe, epoch, source_of_first, control, limit,
    SOURCES: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Repeats `look` until all words are of this call, and returns its sums; after `limit` looks it records a note."""
    missing, low, high = look(addresses, stride, inside, safe, epoch, SOURCES, TWO, PAYLOAD, TARGET)
    absent = anywhere(missing, TARGET)
    looks = 0
    while (absent != 0) & (looks < limit):
        missing, low, high = look(addresses, stride, inside, safe, epoch, SOURCES, TWO, PAYLOAD, TARGET)
        absent = anywhere(missing, TARGET)
        looks += 1
        if looks % 64 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                looks = limit
    if absent != 0:
        for source in tl.range(0, SOURCES):
            words = load_whole(addresses + source * stride, inside, safe, epoch.to(tl.int64) << 32, TARGET)
            late = tl.max(tl.where(inside, epoch - (words >> 32).to(tl.int32), 0))
            if late != 0:
                note_missing(control, source_of_first + source, source_of_first + source, epoch, epoch - late, TARGET)
    return low, high


@triton.jit
def store_pair(
    out, bias, residual, added, low, high, row, row_end, below, word, n,
    ROWS: tl.constexpr, WORDS: tl.constexpr, TWO: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Stores unpacked columns, from the word-th of a row on. Rows from `below` on are padding."""
    rows = row + tl.arange(0, ROWS)
    if TWO:
        block = tl.reshape(tl.join(low, high), [ROWS, 2 * WORDS])
        block = with_addends(block, bias, residual, added, row, below, 2 * word, n, ROWS, 2 * WORDS, ALIGNED_N)
        cols = 2 * word + tl.arange(0, 2 * WORDS)
    else:
        block = with_addends(low, bias, residual, added, row, below, word, n, ROWS, WORDS, ALIGNED_N)
        cols = word + tl.arange(0, WORDS)
    inside = (rows < row_end)[:, None] & (cols < n)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * n + cols[None, :], rounded(block, out.dtype.element_ty, TARGET), mask=inside)


@triton.jit
def send(
    block, words, epoch, row, top, col, n, rows, bases, rank, place, tile,
    WORLD: tl.constexpr, HOW: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows row ... top - 1 to the ranks that add them up. `place` is the offset, in words, of this rank's box."""
    width = tl.cdiv(n, 2) if TWO else n
    first = col // 2 if TWO else col
    line = row + tl.arange(0, ROWS)
    word = first + tl.arange(0, COLS // 2 if TWO else COLS)
    inside = (line < top)[:, None] & (word < width)[None, :]
    data = packed(block, epoch, TWO, PAYLOAD, TARGET)
    base = words.to(tl.int64) - tl.load(bases + rank) + place * 8
    if HOW == "scattered":
        owner = tl.minimum(line // rows, WORLD - 1)
        start = (tl.load(bases + owner) + base).to(words.dtype) + (line - owner * rows).to(tl.int64) * width
        store_whole(tl.multiple_of(start[:, None] + word[None, :], (8, 8)), data, inside, TARGET)
    else:
        within = line.to(tl.int64)[:, None] * width + word[None, :]
        if HOW == "two":
            addresses = (tl.load(bases + tile % WORLD) + base).to(words.dtype) + within
            store_whole(tl.multiple_of(addresses, (8, 16)), data, inside, TARGET)
        else:
            for hop in tl.static_range(1, WORLD + 1):
                addresses = (tl.load(bases + (rank + hop) % WORLD) + base).to(words.dtype) + within
                store_whole(tl.multiple_of(addresses, (8, 16)), data, inside, TARGET)


@triton.jit(do_not_specialize=["rank", "added"])
def words_kernel(
    a, b, out, bias, residual, added, words, sums, partials, finished, bases, control, rank, m, n, k, rows, room,
    WORLD: tl.constexpr, HOW: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, SUMS_TWO: tl.constexpr, SUM: tl.constexpr,
    KN: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, TMA: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`words` are [2, source, room, words of a row], `sums` [2, room, words of a row]; `room` is all rows or those of a rank."""
    epoch = tl.load(control + EPOCH)
    limit = tl.load(control + LIMIT)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    slot = (epoch & 1).to(tl.int64)
    width = tl.cdiv(n, 2) if TWO else n
    size = room * width.to(tl.int64)
    m_all = WORLD * rows if HOW == "scattered" else m
    m_tiles = tl.cdiv(m_all, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    whole = whole_tiles(m_tiles * n_tiles, programs, SPLITS)
    blocks = tl.cdiv(k, BLOCK_K)
    place = (slot * WORLD + rank) * size
    for item in tl.range(program, pieces(m_tiles * n_tiles, whole, SPLITS), programs):
        at = grouped(tile_of(item, whole, SPLITS), m_tiles, n_tiles, GROUP_M)
        row = at // n_tiles * BLOCK_M
        tile = at % n_tiles
        col = tile * BLOCK_N
        start, end = 0, k
        if SPLITS > 1:
            start = first_block(item, whole, SPLITS, blocks) * BLOCK_K
            end = tl.minimum(last_block(item, whole, SPLITS, blocks) * BLOCK_K, k)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = multiplied(
            acc, a, row, m, b, col, n, k, start, end, KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED_K, ALIGNED_N, TARGET
        )
        top = tl.minimum(row + BLOCK_M, m_all)
        if SPLITS > 1:
            if item >= whole:
                cut = (item - whole) // SPLITS
                if last_of_parts(acc, partials, finished, cut, (item - whole) % SPLITS, SPLITS, BLOCK_M, BLOCK_N, TARGET):
                    parts = partials + cut.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N
                    total = part_of_tile(parts, 0, SPLITS, BLOCK_M, BLOCK_M, BLOCK_N)
                    send(
                        total, words, epoch, row, top, col, n, rows, bases, rank, place, tile,
                        WORLD, HOW, TWO, PAYLOAD, BLOCK_M, BLOCK_N, TARGET,
                    )  # fmt: skip
            else:
                send(
                    acc, words, epoch, row, top, col, n, rows, bases, rank, place, tile,
                    WORLD, HOW, TWO, PAYLOAD, BLOCK_M, BLOCK_N, TARGET,
                )  # fmt: skip
        else:
            send(
                acc, words, epoch, row, top, col, n, rows, bases, rank, place, tile,
                WORLD, HOW, TWO, PAYLOAD, BLOCK_M, BLOCK_N, TARGET,
            )  # fmt: skip
    add_and_leave(
        out, bias, residual, added, words, sums, bases, control, limit, epoch, slot, rank, program, programs, m, n, rows, room, size, width,
        WORLD, HOW, TWO, PAYLOAD, SUMS_TWO, SUM, BLOCK_N, ROWS, WORDS, ALIGNED_N, TARGET,
    )  # fmt: skip


@triton.jit
def add_words(
    out, bias, residual, added, words, sums, bases, control, limit, epoch, slot, rank, first, step, m, n, rows, room, size, width,
    WORLD: tl.constexpr, HOW: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, SUMS_TWO: tl.constexpr, SUM: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds up every step-th piece of this rank's share, and stores it or sends it to all ranks."""
    height = rows if HOW == "scattered" else m
    down = tl.cdiv(height, ROWS)
    per: tl.constexpr = BLOCK_N // 2 if TWO else BLOCK_N  # words per tile row
    inner: tl.constexpr = per // WORDS if HOW == "two" else 1
    n_tiles = tl.cdiv(n, BLOCK_N)
    across = tl.cdiv(n_tiles - rank, WORLD) * inner if HOW == "two" else tl.cdiv(width, WORDS)
    box = words + slot * WORLD * size
    for piece in tl.range(first, down * across, step, num_stages=1):
        row = piece // across * ROWS
        word = piece % across * WORDS
        if HOW == "two":
            word = (rank + piece % across // inner * WORLD) * per + piece % across % inner * WORDS
        line = row + tl.arange(0, ROWS)
        at = word + tl.arange(0, WORDS)
        inside = (line < height)[:, None] & (at < width)[None, :]
        addresses = box + line.to(tl.int64)[:, None] * width + at[None, :]
        low, high = await_sum(addresses, size, inside, words, epoch, 0, control, limit, WORLD, TWO, PAYLOAD, TARGET)
        if HOW == "two":
            col = word * 2 if TWO else word
            cols: tl.constexpr = 2 * WORDS if TWO else WORDS
            block = tl.reshape(tl.join(low, high), [ROWS, cols]) if TWO else low
            sum_width = tl.cdiv(n, 2) if SUMS_TWO else n
            at = (col // 2 if SUMS_TWO else col) + tl.arange(0, cols // 2 if SUMS_TWO else cols)
            within = line.to(tl.int64)[:, None] * sum_width + at[None, :]
            data = packed(block, epoch, SUMS_TWO, SUM, TARGET)
            mine = sums + slot * room * sum_width
            base = mine.to(tl.int64) - tl.load(bases + rank)
            for hop in tl.static_range(1, WORLD + 1):
                theirs = (tl.load(bases + (rank + hop) % WORLD) + base).to(sums.dtype) + within
                store_whole(tl.multiple_of(theirs, (8, 16)), data, (line < m)[:, None] & (at < sum_width)[None, :], TARGET)
        else:
            below = tl.minimum(rows, m - rank * rows) if HOW == "scattered" else m
            store_pair(out, bias, residual, added, low, high, row, height, below, word, n, ROWS, WORDS, TWO, ALIGNED_N, TARGET)


@triton.jit
def receive_words(
    out, bias, residual, added, sums, control, limit, epoch, slot, first, step, m, n, room,
    WORLD: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Receives every step-th piece of the sums that the ranks have sent."""
    width = tl.cdiv(n, 2) if TWO else n
    per: tl.constexpr = BLOCK_N // 2 if TWO else BLOCK_N
    across = tl.cdiv(width, WORDS)
    box = sums + slot * room * width
    limit = 2 * limit  # so that the first note is of a wait for partial sums, which names the missing rank
    for piece in tl.range(first, tl.cdiv(m, ROWS) * across, step, num_stages=1):
        row = piece // across * ROWS
        word = piece % across * WORDS
        line = row + tl.arange(0, ROWS)
        at = word + tl.arange(0, WORDS)
        inside = (line < m)[:, None] & (at < width)[None, :]
        addresses = box + line.to(tl.int64)[:, None] * width + at[None, :]
        low, high = await_sum(addresses, 0, inside, sums, epoch, word // per % WORLD, control, limit, 1, TWO, PAYLOAD, TARGET)
        store_pair(out, bias, residual, added, low, high, row, m, m, word, n, ROWS, WORDS, TWO, ALIGNED_N, TARGET)


@triton.jit
def add_and_leave(
    out, bias, residual, added, words, sums, bases, control, limit, epoch, slot, rank, program, programs, m, n, rows, room, size, width,
    WORLD: tl.constexpr, HOW: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, SUMS_TWO: tl.constexpr, SUM: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Ends a call, after a program has sent its tiles: adds up its pieces, and with `two` shots receives those of other ranks."""
    # The interpreter runs programs one after another, so there only the last program does the work that waits.
    if (TARGET != "interpreter") | (program == programs - 1):
        first = 0 if TARGET == "interpreter" else program
        step = 1 if TARGET == "interpreter" else programs
        add_words(
            out, bias, residual, added, words, sums, bases, control, limit, epoch, slot, rank, first, step, m, n, rows, room, size, width,
            WORLD, HOW, TWO, PAYLOAD, SUMS_TWO, SUM, BLOCK_N, ROWS, WORDS, ALIGNED_N, TARGET,
        )  # fmt: skip
        if HOW == "two":
            receive_words(
                out, bias, residual, added, sums, control, limit, epoch, slot, first, step, m, n, room,
                WORLD, SUMS_TWO, SUM, BLOCK_N, ROWS, WORDS, ALIGNED_N, TARGET,
            )  # fmt: skip
    leave(control, epoch, programs, TARGET)


class Words(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, dtype = problem.world_size, context.dtype(problem)
        wire = torch.float32 if config["payload"] == "fp32" else dtype
        two, sums_two = wire.itemsize == 2, dtype.itemsize == 2
        self.how = "scattered" if problem.output == "scattered" else config["shots"]
        self.room = problem.shard_rows if self.how == "scattered" else problem.m
        width, sum_width = ceil_div(problem.n, 1 + two), ceil_div(problem.n, 1 + sums_two)
        self.words = context.heap.zeros((2, world, self.room, width), torch.int64)
        self.sums = context.heap.zeros((2, self.room, sum_width) if self.how == "two" else (1, 1, 2), torch.int64)
        splits = config["splits"]
        cut = 0 if splits == 1 else context.processors - 1
        self.partials = context.empty((max(1, cut * splits), self.tiles.block_m, self.tiles.block_n), torch.float32)
        self.finished = context.empty((max(1, cut),), torch.int32).zero_()
        rows = min(self.tiles.block_m, power_of_two(self.room))
        self.constants: dict[str, Any] = {
            "WORLD": world, "HOW": self.how, "TWO": two, "PAYLOAD": TYPES[wire], "SUMS_TWO": sums_two, "SUM": TYPES[dtype],
            "KN": problem.weight == "kn", "ALIGNED_K": math.gcd(problem.k, 16), "ALIGNED_N": math.gcd(problem.n, 16),
            **{name: value for name, value in self.tiles.constants.items() if name != "INTERLEAVED"},
            **piece_of(self.how, self.tiles.block_n // (1 + two), rows),
        }  # fmt: skip

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context, tiles = self.problem, self.context, self.tiles
        view_b: Any = tiles.view_b(b)
        if tiles.tma and problem.weight == "kn":
            view_b = TensorDescriptor.from_tensor(b, [tiles.block_k, tiles.block_n])
        context.launch(
            words_kernel, (context.processors,),
            tiles.view_a(a), view_b, out, *addends(out, bias, residual), self.words, self.sums, self.partials, self.finished, context.heap.bases, self.control,
            context.rank, problem.m, problem.n, problem.k, problem.shard_rows, self.room,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Supports any number of rows: slots keep their places, and a word carries the number of its call."""
        return {}

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def piece_of(how: str, tile_words: int, rows: int) -> dict[str, int]:
    """Rows and words of a piece. With `two` shots a piece lies in one tile."""
    rows = min(rows, 16)
    words = PIECE_WORDS // rows
    if how == "two":
        words = min(words, tile_words)
        rows = PIECE_WORDS // words
    return {"ROWS": rows, "WORDS": words}


@triton.jit(do_not_specialize=["rank", "added"])
def scaled_words_kernel(
    a, scales_a, stride_m, stride_g, b, scales_b, out, bias, residual, added, words, sums, partials, finished, bases, control,
    rank, m, n, k, rows, room,
    WORLD: tl.constexpr, HOW: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, SUMS_TWO: tl.constexpr, SUM: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALES: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, STRIP: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_N: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """`words_kernel` with a product of e4m3."""
    epoch = tl.load(control + EPOCH)
    limit = tl.load(control + LIMIT)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    slot = (epoch & 1).to(tl.int64)
    width = tl.cdiv(n, 2) if TWO else n
    size = room * width.to(tl.int64)
    m_all = WORLD * rows if HOW == "scattered" else m
    m_tiles = tl.cdiv(m_all, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    whole = whole_tiles(m_tiles * n_tiles, programs, SPLITS)
    blocks = tl.cdiv(k, STRIP)
    place = (slot * WORLD + rank) * size
    for item in tl.range(program, pieces(m_tiles * n_tiles, whole, SPLITS), programs):
        at = grouped(tile_of(item, whole, SPLITS), m_tiles, n_tiles, 8)
        row = at // n_tiles * BLOCK_M
        tile = at % n_tiles
        col = tile * BLOCK_N
        start, end = 0, k
        if SPLITS > 1:
            start = first_block(item, whole, SPLITS, blocks) * STRIP
            end = tl.minimum(last_block(item, whole, SPLITS, blocks) * STRIP, k)
        acc = scaled_sum(
            a, scales_a, row, m, stride_m, stride_g, b, scales_b, col, n, start, end, k,
            SCALES, BLOCK_M, BLOCK_N, STRIP, TMA, ALIGNED, TARGET,
        )  # fmt: skip
        top = tl.minimum(row + BLOCK_M, m_all)
        complete = item >= 0
        if SPLITS > 1:
            if item >= whole:
                cut = (item - whole) // SPLITS
                complete = last_of_parts(acc, partials, finished, cut, (item - whole) % SPLITS, SPLITS, BLOCK_M, BLOCK_N, TARGET)
                if complete:
                    acc = part_of_tile(partials + cut.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N, 0, SPLITS, BLOCK_M, BLOCK_M, BLOCK_N)
        if complete:
            acc = with_scales(acc, scales_a, row, m, stride_m, scales_b, col, n, SCALES, BLOCK_M, BLOCK_N)
            acc = tl.where((row + tl.arange(0, BLOCK_M) < m)[:, None], acc, 0.0)  # padding times a NaN of B is NaN
            send(
                acc, words, epoch, row, top, col, n, rows, bases, rank, place, tile,
                WORLD, HOW, TWO, PAYLOAD, BLOCK_M, BLOCK_N, TARGET,
            )  # fmt: skip
    add_and_leave(
        out, bias, residual, added, words, sums, bases, control, limit, epoch, slot, rank, program, programs, m, n, rows, room, size, width,
        WORLD, HOW, TWO, PAYLOAD, SUMS_TWO, SUM, BLOCK_N, ROWS, WORDS, ALIGNED_N, TARGET,
    )  # fmt: skip


class ScaledWords(Words):
    """`Words` with a product of e4m3. Tensors of a call: see `scaled_sums.Scaled`."""


    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.tile = tile = Tile(config, context)
        inner = Config.of(
            config.variant, block_m=tile.rows, block_n=tile.columns, block_k=tile.strip, num_warps=tile.warps, num_stages=tile.stages,
            group_m=8, splits=tile.splits, loads="tma" if tile.tma else "pointer", payload=config["payload"], shots=config["shots"],
        )  # fmt: skip
        self.quantised = Quantiser(problem, problem.m, context)
        super().__init__(plain(problem), inner, context)
        self.config, self.problem = config, problem
        taken = ("WORLD", "HOW", "TWO", "PAYLOAD", "SUMS_TWO", "SUM", "ROWS", "WORDS", "ALIGNED_N")
        self.constants = {name: self.constants[name] for name in taken} | tile.constants(problem)

    def __call__(self, a: Tensor, b: Tensor, *rest: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        of_a, scales_b, out = rest[:-2], rest[-2], rest[-1]
        a, scales_a = self.quantised(a, of_a[0] if of_a else None)
        problem, context, tile = self.problem, self.context, self.tile
        strides = scales_a.stride() if scales_a.dim() == 2 else (0, 0)
        context.launch(
            scaled_words_kernel, (context.processors,),
            tile.view(a, tile.rows), scales_a, *strides, tile.view(b, tile.columns), scales_b, out, *addends(out, bias, residual),
            self.words, self.sums, self.partials, self.finished, context.heap.bases, self.control,
            context.rank, problem.m, problem.n, problem.k, problem.shard_rows, self.room,
            **self.constants,
        )  # fmt: skip
