"""specialized_words, for few rows: one kernel whose groups multiply, send and add up. For Hopper.

A group multiplies as in `specialized_product`. It rounds its rows of a tile to the type of C and sends them as words of four
elements, which need no flag: NOTHING marks a word that has not come (see `push_words`). Rows of a replicated output go to all
peers, those of a scattered one to their owner. Then the group polls for the peers' words of the rows that its rank adds up, adds up
all ranks' in their order, and puts NOTHING back.

All ranks take tiles in one order and send before they wait. Tiles of all owners that multiply the same columns of B follow each
other: a rank that took the tiles of other owners first was 5 to 11 % slower (results/h200x2/gemm-reduce-scatter/README.md). All
programs are resident, one per processor. So every wait is for a rank that has not begun. Two slots suffice: a rank begins a call
only after the last, for which it had words from all peers, and those send theirs of a call after they have put back NOTHING of the
one before. Rows of padding are sent too, as zeros, so that every rank has words of every call. See docs/memory-model.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.push_words import NOTHING
from autotax.kernels.all_gather_gemm.roles import X_ROWS, allocate, reinterpret
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, addends
from autotax.kernels.primitives import EPOCH, LIMIT, leave, note_missing, settle
from autotax.kernels.scaled_roles import await_launch
from autotax.kernels.specialized_product import SpecializedProduct, load_blocks, place_of_sums, sum_of_tile
from autotax.kernels.tiling import ProductTile
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

WORD = gl.constexpr(4)
"""Elements of a word."""
_NOTHING = gl.constexpr(NOTHING)


@gluon.constexpr_function
def layout_of_words(across):
    """Four warps for rows of `across` words: neighbouring threads hold neighbouring words."""
    lanes = min(across, 32)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def element(words, NUMBER: gl.constexpr, TYPE: gl.constexpr):
    """The NUMBER-th element of each word, in float32."""
    return (words >> (16 * NUMBER)).to(gl.int16).to(TYPE, bitcast=True).to(gl.float32)


@gluon.jit
def packed(value, NUMBER: gl.constexpr, TYPE: gl.constexpr):
    """Words with the rounded value as their NUMBER-th element, and zeros."""
    return (value.to(TYPE).to(gl.int16, bitcast=True).to(gl.int64) & 0xFFFF) << (16 * NUMBER)


@gluon.jit
def words_of(tile, staging, TARGET: gl.constexpr):
    """A tile [64, columns] in the type of `staging` as words, by way of it. A word like NOTHING becomes zeros."""
    WIDE: gl.constexpr = tile.shape[1]
    # The swizzle moves units of 16 bytes, the same ones for both types.
    reinterpret(staging, staging.dtype, [X_ROWS, WIDE], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])).store(tile.to(staging.dtype))
    settle(TARGET)
    words = reinterpret(staging, gl.int64, [X_ROWS, WIDE // WORD], gl.SwizzledSharedLayout(2, 1, 8, [1, 0]))
    loaded = words.load(layout_of_words(WIDE // WORD))
    settle(TARGET)  # before the next tile is staged
    return gl.where(loaded == _NOTHING, 0, loaded)


@gluon.jit
def sum_of_ranks(own, words, at, inside, control, rank, epoch, room, WORLD: gl.constexpr, TYPE: gl.constexpr, TARGET: gl.constexpr):
    """The float32 sums of all ranks' words, element by element, in the order of the ranks. Waits for the peers' words."""
    layout: gl.constexpr = own.type.layout
    zeroth = gl.zeros([own.shape[0], own.shape[1]], gl.float32, layout)
    first, second, third = zeroth, zeroth, zeroth
    limit = gl.load(control + LIMIT)
    for source in gl.static_range(WORLD):
        arriving = words + gl.cast(((epoch & 1) * WORLD + source) * room, gl.int64) + at
        theirs = inside & (rank != source)
        word = gl.load(arriving, mask=theirs, other=0, volatile=True)
        polls = 0
        while (gl.max(gl.max((word == _NOTHING).to(gl.int32), 1), 0) > 0) & (polls < limit):
            word = gl.load(arriving, mask=theirs, other=0, volatile=True)
            polls += 1
        if polls == limit:
            note_missing(control, source, 0, epoch, 0, TARGET)
            limit = polls * 0 + 1  # later waits of the call give up soon
        gl.store(arriving, word * 0 + _NOTHING, mask=theirs)
        word = gl.where(theirs, word, own)
        zeroth = zeroth + element(word, 0, TYPE)
        first = first + element(word, 1, TYPE)
        second = second + element(word, 2, TYPE)
        third = third + element(word, 3, TYPE)
    return zeroth, first, second, third


@gluon.jit
def with_addends(total, bias, residual, NUMBER: gl.constexpr, SCATTERED: gl.constexpr, TYPE: gl.constexpr):
    """The sum plus this rank's addends. All ranks share the rounded sum of a replicated output."""
    if not SCATTERED:
        total = total.to(TYPE).to(gl.float32)
    return total + element(bias, NUMBER, TYPE) + element(residual, NUMBER, TYPE)


@gluon.jit
def exchange(tile, row, col, exchanged, staging, share, WORLD: gl.constexpr, SCATTERED: gl.constexpr, TARGET: gl.constexpr):
    """Sends a group's rows of a tile to their owners or to all peers, then stores the sums of all ranks' rows.

    `exchanged` are (out, bias, residual, added, words, bases, control, rank, epoch, room): matrices as words, which addends there are
    (None: none), the inbox [2, WORLD, room], and the heap's bases.
    """
    out, bias, residual, added, words, bases, control, rank, epoch, room = exchanged
    _, m, n, _ = share
    TYPE: gl.constexpr = staging.dtype
    ACROSS: gl.constexpr = tile.shape[1] // WORD
    layout: gl.constexpr = layout_of_words(ACROSS)
    own = words_of(tile, staging, TARGET)
    r = row + gl.arange(0, X_ROWS, layout=gl.SliceLayout(1, layout))
    c = col // WORD + gl.arange(0, ACROSS, layout=gl.SliceLayout(0, layout))
    width = n // WORD
    real = (r < m)[:, None] & (c < width)[None, :]
    inside = real
    adds = real
    at = r[:, None] * width + c[None, :]
    owner = r
    if SCATTERED:
        high = gl.cdiv(m, WORLD)
        owner = r // high
        inside = (r < high * WORLD)[:, None] & (c < width)[None, :]
        adds = inside & (owner == rank)[:, None]
        at = (r % high)[:, None] * width + c[None, :]
        own = gl.where(real, own, 0)
    place = words.to(gl.int64) - gl.load(bases + rank) + 8 * gl.cast(((epoch & 1) * WORLD + rank) * room, gl.int64)
    for hop in gl.static_range(1, WORLD):
        peer = (rank + hop) % WORLD
        theirs = (gl.load(bases + peer) + place).to(words.dtype)
        gl.store(theirs + at, own, mask=inside & (owner == peer)[:, None] if SCATTERED else inside)
    zeroth, first, second, third = sum_of_ranks(own, words, at, adds, control, rank, epoch, room, WORLD, TYPE, TARGET)
    if added is not None:
        of_bias = gl.load(bias + c, mask=(c < width) & (added % 2 == 1), other=0)[None, :]
        if SCATTERED:
            of_bias = gl.where(real, of_bias, 0)
        of_rows = gl.load(residual + at, mask=adds & real & (added >= 2), other=0)
        zeroth = with_addends(zeroth, of_bias, of_rows, 0, SCATTERED, TYPE)
        first = with_addends(first, of_bias, of_rows, 1, SCATTERED, TYPE)
        second = with_addends(second, of_bias, of_rows, 2, SCATTERED, TYPE)
        third = with_addends(third, of_bias, of_rows, 3, SCATTERED, TYPE)
    all_four = packed(zeroth, 0, TYPE) | packed(first, 1, TYPE) | packed(second, 2, TYPE) | packed(third, 3, TYPE)
    gl.store(out + at, all_four, mask=adds)


@gluon.jit
def multiply_and_add(
    GROUP: gl.constexpr, TURN: gl.constexpr, of_all, exchanged, stagings, buffers, sums, share,
    WORLD: gl.constexpr, SCATTERED: gl.constexpr, SCALES: gl.constexpr, SPLITS: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, Y1: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """A group: `specialized_product.multiply`, whose complete tiles are exchanged."""
    turn = 0
    phase = 0
    for item in range(gl.program_id(0), share[0], gl.num_programs(0)):
        tile, _, _, complete, row, col, turn = sum_of_tile(
            item, turn, phase, GROUP, TURN, of_all, buffers, sums, share,
            SCALES, SPLITS, GROUPS, TURNS, Y1, 0, 0, STAGES, STRIPS, TARGET,
        )  # fmt: skip
        if TURN == 0:
            if complete:
                exchange(tile, row, col, exchanged, stagings.index(GROUP), share, WORLD, SCATTERED, TARGET)
        phase ^= 1


@gluon.jit
def add_tiles(
    a, b, box, of_all, exchanged, share,
    WORLD: gl.constexpr, SCATTERED: gl.constexpr, SCALES: gl.constexpr, SPLITS: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, Y1: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The work of a program. `box` is a TMA descriptor of C, whose box says how much a group stages."""
    buffers, stagings = allocate(a, box, 1, GROUPS, Y1, 0, 0, STAGES, 1)
    sums = (None, None, None)
    if TURNS > 1:
        sums = place_of_sums(Y1, 0, 0)
    fence_async_shared()
    gl.static_assert(GROUPS * TURNS <= 2)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS * TURNS == 1:
        gl.warp_specialize(
            [
                (multiply_and_add, (0, 0, of_all, exchanged, stagings, buffers, sums, share, WORLD, SCATTERED, SCALES, SPLITS, GROUPS, TURNS, Y1, STAGES, STRIPS, TARGET)),
                (load_blocks, (a, (b, b, b), buffers, share, SPLITS, GROUPS, Y1, 0, 0, STAGES, STRIPS)),
            ],
            [1],
            [88],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_and_add, (0, 0, of_all, exchanged, stagings, buffers, sums, share, WORLD, SCATTERED, SCALES, SPLITS, GROUPS, TURNS, Y1, STAGES, STRIPS, TARGET)),
                (multiply_and_add, (1 // TURNS, 1 % TURNS, of_all, exchanged, stagings, buffers, sums, share, WORLD, SCATTERED, SCALES, SPLITS, GROUPS, TURNS, Y1, STAGES, STRIPS, TARGET)),
                (load_blocks, (a, (b, b, b), buffers, share, SPLITS, GROUPS, Y1, 0, 0, STAGES, STRIPS)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["m", "rank", "added"])
def specialized_words_kernel(
    a, b, box, scales_a, stride_m, stride_g, scales_b, partials, finished, m, n, cols,
    out, bias, residual, added, words, bases, control, rank, room,
    WORLD: gl.constexpr, SCATTERED: gl.constexpr, SCALES: gl.constexpr, SPLITS: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, Y1: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """See `specialized_product_kernel` for the first line, `exchange` for the second."""
    await_launch()
    epoch = gl.load(control + EPOCH)
    items = gl.cdiv(m, GROUPS * X_ROWS) * gl.cdiv(n, Y1) * SPLITS
    of_all = (scales_a, stride_m, stride_g, scales_b, partials, finished)
    exchanged = (out, bias, residual, added, words, bases, control, rank, epoch, room)
    add_tiles(
        a, b, box, of_all, exchanged, (items, m, n, cols),
        WORLD, SCATTERED, SCALES, SPLITS, GROUPS, TURNS, Y1, STAGES, STRIPS, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class SpecializedWords(Adding):
    """The product of `specialized_product` with its sum."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.product = SpecializedProduct(ProductTile.of(config["product"]), config["splits"], problem, problem.m, context)
        self.constants = {name: value for name, value in self.product.constants.items() if name not in ("Y2", "Y3")}
        self.scattered = problem.output == "scattered"
        self.room = problem.out_rows * problem.n // WORD.value
        self.words = context.heap.alloc((2 * problem.world_size * self.room,), torch.int64).fill_(NOTHING)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        self.launch(a, None, b, None, out, bias, residual)

    def launch(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor | None, out: Tensor, *more: Tensor | None) -> None:
        """See `SpecializedProduct.arguments`; `more` are the bias and the residual, or None."""
        context, product = self.context, self.product
        *added, which = addends(out, *more)
        matrices = [matrix if matrix is None else matrix.view(-1).view(torch.int64) for matrix in (out, *added)]
        view_a, view_b, _, _, box, _, _, *others = product.arguments(a, scales_a, b, scales_b, out)  # a tile has one part
        context.launch(
            specialized_words_kernel, product.grid(len(a)), view_a, view_b, box, *others,
            *matrices, which, self.words, context.heap.bases, self.control, context.rank, self.room,
            WORLD=self.problem.world_size, SCATTERED=self.scattered, **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Any number of rows: each call takes the words that it sends and restores their markers."""
        return {}


class ScaledSpecializedWords(SpecializedWords):
    """`SpecializedWords` for e4m3. Tensors of a call: see `scaled_sums.Scaled`."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.quantised = Quantiser(problem, problem.m, context)

    def __call__(self, a: Tensor, b: Tensor, *rest: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        of_a, scales_b, out = rest[:-2], rest[-2], rest[-1]
        codes, scales = self.quantised(a, of_a[0] if of_a else None)
        self.launch(codes, scales, b, scales_b, out, bias, residual)
