"""scaled_words: `words` with a product of e4m3. `words` says why every wait ends and no word is mistaken."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.addends import addends
from autotax.kernels.gemm_reduce_scatter.product import last_of_parts, part_of_tile
from autotax.kernels.gemm_reduce_scatter.scaled_sums import plain
from autotax.kernels.gemm_reduce_scatter.words import Words, add_words, receive_words, send
from autotax.kernels.primitives import EPOCH, LIMIT, arithmetic, leave
from autotax.kernels.scaled_product import BLOCK_K, Tile, scaled_sum, with_scales
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

grouped = arithmetic(tiling.grouped)
whole_tiles = arithmetic(tiling.whole_tiles)
tile_of = arithmetic(tiling.tile_of)
first_block = arithmetic(tiling.first_block)
last_block = arithmetic(tiling.last_block)
pieces = arithmetic(tiling.pieces)


@triton.jit(do_not_specialize=["rank", "added"])
def scaled_words_kernel(
    a, scales_a, stride_m, stride_g, b, scales_b, out, bias, residual, added, words, sums, partials, finished, bases, control,
    rank, m, n, k, rows, room,
    WORLD: tl.constexpr, HOW: tl.constexpr, TWO: tl.constexpr, PAYLOAD: tl.constexpr, SUMS_TWO: tl.constexpr, SUM: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALES: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_N: tl.constexpr, TARGET: tl.constexpr,
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
    blocks = tl.cdiv(k, BLOCK_K)
    place = (slot * WORLD + rank) * size
    for item in tl.range(program, pieces(m_tiles * n_tiles, whole, SPLITS), programs):
        at = grouped(tile_of(item, whole, SPLITS), m_tiles, n_tiles, 8)
        row = at // n_tiles * BLOCK_M
        tile = at % n_tiles
        col = tile * BLOCK_N
        start, end = 0, k
        if SPLITS > 1:
            start = first_block(item, whole, SPLITS, blocks) * BLOCK_K
            end = tl.minimum(last_block(item, whole, SPLITS, blocks) * BLOCK_K, k)
        acc = scaled_sum(
            a, scales_a, row, m, stride_m, stride_g, b, scales_b, col, n, start, end, k,
            SCALES, BLOCK_M, BLOCK_N, TMA, ALIGNED, TARGET,
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


class ScaledWords(Words):
    """Tensors of a call: see Scaled."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.tile = tile = Tile(config, context)
        inner = Config.of(
            config.variant, block_m=tile.rows, block_n=tile.columns, block_k=BLOCK_K.value, num_warps=tile.warps, num_stages=tile.stages,
            group_m=8, splits=tile.splits, loads="tma" if tile.tma else "pointer", payload=config["payload"], shots=config["shots"],
        )  # fmt: skip
        self.quantised = Quantiser(problem, problem.m, context)
        super().__init__(plain(problem), inner, context)
        self.config, self.problem = config, problem
        taken = ("WORLD", "HOW", "TWO", "PAYLOAD", "SUMS_TWO", "SUM", "ROWS", "WORDS", "ALIGNED_N")
        self.constants = {name: self.constants[name] for name in taken} | tile.constants(problem)

    def __call__(
        self, a: Tensor, b: Tensor, *rest: Any, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        """See Scaled.__call__."""
        of_a, scales_b, out = rest[:-2], rest[-2], rest[-1]
        a, scales_a = self.quantised(a, of_a[0] if of_a else None)
        problem, context, tile = self.problem, self.context, self.tile
        strides = scales_a.stride() if scales_a.dim() == 2 else (0, 0)
        context.launch(
            scaled_words_kernel,
            (context.processors,),
            tile.view(a, tile.rows), scales_a, *strides, tile.view(b, tile.columns), scales_b, out, *addends(out, bias, residual),
            self.words, self.sums, self.partials, self.finished, context.heap.bases, self.control,
            context.rank, problem.m, problem.n, problem.k, problem.shard_rows, self.room,
            **self.constants,
        )  # fmt: skip
