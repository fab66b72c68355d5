"""push_packets: for few rows, on any machine. The shards of A travel as 8-byte words that carry the number of their call.

So neither flags in the heap nor system-scope fences are needed. A word has four bytes of A in its low half and the
number of the call in its high half. One store writes it. The reader loads its words repeatedly until each has this
call's number. The whole program votes on whether all words have it (see `primitives`). The values that passed the
vote are then stored in a dense copy of A on this GPU.

Waits: every program first sends its part of this rank's shard to all peers, without waiting. Then it receives its
part of the other shards, counts itself on its GPU, and waits until all programs are counted. Then it multiplies.
There is one program per processor, so all run at the same time. A program counts itself only after its last word, and
it sends words before any wait. So every wait ends.

There are two slots, chosen by the parity of the call; the dense copy and the count have one. `docs/memory-model.md` says why no
stale word matches and none is replaced too early.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.gemm import (
    TileOptions,
    finish,
    first_block,
    grouped,
    last_block,
    pieces,
    product,
    tile_of,
    whole_tiles,
    zeros,
)
from autotax.kernels.all_gather_gemm.push_gather import warm
from autotax.kernels.all_gather_gemm.scaled_shards import Scaled, codes_of
from autotax.kernels.context import Context, note_of
from autotax.kernels.head_gather import await_words
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, LIMIT, leave, signal, store_whole, translate, wait
from autotax.kernels.scaled_product import Tile, scaled_item
from autotax.operators.all_gather_gemm import AllGatherGemm

WORD_BYTES = 4
"""Bytes of A in a word."""
PATIENCE = 4
"""Factor by which waits for programs of this rank are longer than waits for peers. So the first note names the missing peer."""


@triton.jit
def place_in_a(at, source, size, width, WORLD: tl.constexpr, SHARD_K: tl.constexpr):
    """The index in A of the at-th word of a shard. The shard has `size` words, `width` per row. A has less than 2^31 words."""
    if SHARD_K:
        return at // width * (WORLD * width) + source * width + at % width
    else:  # noqa: RET505 - decided at compile time
        return source * size + at


@triton.jit
def send_packets(
    a, dense, words, bases, epoch, rank, size, width, room,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, PIECE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes every n-th piece of this rank's shard to each peer, for n programs, and last to its place in the local copy of A."""
    number = epoch.to(tl.int64) << 32
    box = words + ((epoch & 1) * WORLD + rank).to(tl.int64) * room
    parts = tl.cdiv(size, PIECE)
    for unit in tl.range(tl.program_id(0), WORLD * parts, tl.num_programs(0), num_stages=1):
        peer = (rank + 1 + unit // parts) % WORLD
        at = unit % parts * PIECE + tl.arange(0, PIECE)
        inside = at < size
        data = tl.load(a + at, mask=inside, other=0)
        if peer == rank:
            tl.store(dense + place_in_a(at, rank, size, width, WORLD, SHARD_K), data, mask=inside)
        else:
            addresses = translate(box, bases, rank, peer) + at
            store_whole(tl.multiple_of(addresses, (16,)), number | (data.to(tl.int64) & 0xFFFFFFFF), inside, TARGET)


@triton.jit
def receive_packets(
    dense, words, control, epoch, rank, size, width, room, first, step,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, PIECE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for every step-th piece of the other shards and stores it in its place in A."""
    limit = tl.load(control + LIMIT)
    parts = tl.cdiv(size, PIECE)
    for unit in tl.range(first, (WORLD - 1) * parts, step, num_stages=1):
        source = (rank + WORLD - 1 - unit // parts) % WORLD
        at = unit % parts * PIECE + tl.arange(0, PIECE)
        inside = at < size
        box = words + ((epoch & 1) * WORLD + source).to(tl.int64) * room
        data = await_words(box + at, inside, words, epoch, source, control, limit, TARGET)
        tl.store(dense + place_in_a(at, source, size, width, WORLD, SHARD_K), data.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def push_packets_kernel(
    a, dense, view, b, out, words, partials, finished, bases, received, control, patient, rank, m, n, k, size, width, room,
    WORLD: tl.constexpr, SHARD_K: tl.constexpr, PIECE: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`a` is this rank's shard and `dense` is A, as int32. `view` is A as the product reads it. `words` are [2, source, room]."""
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    send_packets(a, dense, words, bases, epoch, rank, size, width, room, WORLD, SHARD_K, PIECE, TARGET)
    # The interpreter runs programs one after another, so there only the last program does the work that waits.
    last = program == programs - 1
    first = 0 if TARGET == "interpreter" else program
    step = 1 if TARGET == "interpreter" else programs
    if (TARGET != "interpreter") | last:
        receive_packets(dense, words, control, epoch, rank, size, width, room, first, step, WORLD, SHARD_K, PIECE, TARGET)
    signal(received, 1, TARGET, "gpu")  # only this rank reads the copy of A
    if (TARGET != "interpreter") | last:
        wait(received, epoch * programs, rank, 0, patient, TARGET)
        m_tiles = tl.cdiv(m, BLOCK_M)
        n_tiles = tl.cdiv(n, BLOCK_N)
        whole = whole_tiles(m_tiles * n_tiles, programs, SPLITS)
        blocks = tl.cdiv(k, BLOCK_K)
        for item in tl.range(first, pieces(m_tiles * n_tiles, whole, SPLITS), step):
            at = grouped(tile_of(item, whole, SPLITS), m_tiles, n_tiles, GROUP_M)
            row = at // n_tiles * BLOCK_M
            col = at % n_tiles * BLOCK_N
            start, end = 0, k
            if SPLITS > 1:
                start = first_block(item, whole, SPLITS, blocks) * BLOCK_K
                end = tl.minimum(last_block(item, whole, SPLITS, blocks) * BLOCK_K, k)
            acc = zeros(BLOCK_M, BLOCK_N)
            acc = product(
                acc, view, row, m, k, start, end, (b,), col, n, 0, k, BLOCK_M, BLOCK_N, BLOCK_K, TMA, TMA, ALIGNED, TARGET
            )  # fmt: skip
            finish(out, acc, partials, finished, item, whole, row, col, m, n, SPLITS, BLOCK_M, BLOCK_N, TARGET)
    leave(control, epoch, programs, TARGET)


class PushPackets(Kernel[AllGatherGemm]):
    whole: Tensor

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.tiles = TileOptions.of(config)
        world, dtype = problem.world_size, context.dtype(problem)
        # Rounded up to 16 words: every box begins at a multiple of 128 bytes.
        self.room = ceil_div(problem.shard_rows * problem.shard_cols * problem.item_size // WORD_BYTES, 16) * 16
        # Zeros are words of call 0, which does not exist.
        self.words = context.heap.zeros((2, world, self.room), torch.int64)
        self.received = context.flags(1)
        self.patient = context.control(patience=PATIENCE)
        rows = problem.m if problem.shard == "k" else world * problem.shard_rows
        self.whole = context.empty((rows, problem.k), dtype)
        self.partials, self.finished = self.tiles.parts(problem, config, context)
        self.constants: dict[str, Any] = {
            "WORLD": world, "SHARD_K": problem.shard == "k", "PIECE": config["piece"],
            "ALIGNED": math.gcd(problem.k, 16),
            **{name: value for name, value in self.tiles.constants.items() if name != "INTERLEAVED"},
        }  # fmt: skip

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, context, tiles = self.problem, self.context, self.tiles
        width = problem.shard_cols * problem.item_size // WORD_BYTES
        context.launch(
            push_packets_kernel, (context.processors,),
            a.view(-1).view(torch.int32), self.whole.view(-1).view(torch.int32), tiles.view_a(self.whole), tiles.view_b(b), out,
            self.words, self.partials, self.finished, context.heap.bases, self.received, self.control, self.patient,
            context.rank, problem.m, problem.n, problem.k, problem.shard_rows * width, width, self.room,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: boxes keep their places, and a word carries the number of its call."""
        rows = smaller.m if smaller.shard == "k" else smaller.world_size * smaller.shard_rows
        return {"whole": self.whole[:rows]}

    def failure(self) -> str | None:
        """See Kernel.failure."""
        return super().failure() or note_of(self.patient, self.context.rank)


POLLED_WORDS = 1024
"""Words that are polled together: at least one per thread, since Triton may load a smaller tile twice."""
WARM_ROWS, WARM_WORDS = tl.constexpr(8), tl.constexpr(1024)


@triton.jit(do_not_specialize=["rank"])
def scaled_packets_kernel(
    a, of_a, dense, dense_scales, words, scale_words, view, scales_a, stride_m, stride_g, b, b_words, scales_b, out, partials, finished,
    bases, received, control, patient, rank, m, n, k, items, rows, width, groups, room, scale_room, warm_words,
    WORLD: tl.constexpr, PIECE: tl.constexpr, SCALES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`a` and `of_a` are this rank's bytes and scales as int32, `dense` and `dense_scales` those of all ranks. `view` and
    `scales_a` are the latter as the product reads them. `width` are words of a row, `groups` scales of a row that travel.
    """
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    send_packets(a, dense, words, bases, epoch, rank, rows * width, width, room, WORLD, False, PIECE, TARGET)
    if groups > 0:
        send_packets(
            of_a, dense_scales, scale_words, bases, epoch, rank, rows * groups, rows, scale_room, WORLD, True, PIECE, TARGET
        )
    if warm_words > 0:
        warm(b_words, n, warm_words, k // 4, program, programs, WARM_ROWS, WARM_WORDS)
    # The interpreter runs programs one after another, so there only the last program does the work that waits.
    last = program == programs - 1
    first = 0 if TARGET == "interpreter" else program
    step = 1 if TARGET == "interpreter" else programs
    if (TARGET != "interpreter") | last:
        receive_packets(dense, words, control, epoch, rank, rows * width, width, room, first, step, WORLD, False, PIECE, TARGET)
        if groups > 0:
            receive_packets(
                dense_scales, scale_words, control, epoch, rank, rows * groups, rows, scale_room, first, step, WORLD, True, PIECE, TARGET
            )
    signal(received, 1, TARGET, "gpu")  # only this rank reads the copy of A
    if (TARGET != "interpreter") | last:
        wait(received, epoch * programs, rank, 0, patient, TARGET)
        for item in tl.range(first, items, step):
            scaled_item(
                item, view, scales_a, stride_m, stride_g, b, scales_b, out, partials, finished, m, n, k,
                SCALES, SPLITS, BLOCK_M, BLOCK_N, STRIP, TMA, ALIGNED, TARGET,
            )  # fmt: skip
    leave(control, epoch, programs, TARGET)


class ScaledPackets(Scaled):
    """`push_packets` for e4m3: bytes and scales of a shard travel as words. The scales have boxes of their own.

    Between sending and receiving, `warm` MiB of B are loaded into the L2: nothing else uses the memory while words are under way.
    With `per_processor` 2 two programs share a processor; the space allows that only where both fit, so that all are resident.
    """

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world = problem.world_size
        self.tile = Tile(config, context)
        # Rounded up to 16 words: every box begins at a multiple of 128 bytes. Zeros are words of call 0, which does not exist.
        self.room, self.scale_room = (
            ceil_div(max(1, size), 16) * 16 for size in (self.rows * problem.k // WORD_BYTES, self.rows * self.groups)
        )
        self.words = context.heap.zeros((2, world, self.room), torch.int64)
        self.scale_words = context.heap.zeros((2, world, self.scale_room), torch.int64)
        self.received = context.flags(1)
        self.patient = context.control(patience=PATIENCE)
        self.whole = context.empty((world * self.rows, problem.k), codes_of(problem))
        self.scales = context.empty((max(1, self.groups) * world * self.rows,), torch.float32)
        self.partials, self.finished = self.tile.parts(problem.m, problem.n, context)
        words = min(problem.k // WORD_BYTES, config["warm"] * 2**20 // (problem.n * WORD_BYTES))
        self.warm_words = words // WARM_WORDS.value * WARM_WORDS.value

    def run(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        problem, context, tile, world = self.problem, self.context, self.tile, self.problem.world_size
        codes, scales = self.quantised(a, scales_a)
        ordered = self.scales[: max(1, self.groups) * world * self.rows].view(-1, world * self.rows)
        of_all = self.whole_scales(ordered[:, : problem.m], scales)
        strides = of_all.stride() if of_all.dim() == 2 else (0, 0)
        context.launch(
            scaled_packets_kernel, (context.processors * self.config["per_processor"],),
            codes.view(-1).view(torch.int32), scales.t().view(torch.int32) if self.groups else self.scales.view(torch.int32),
            self.whole.view(-1).view(torch.int32), self.scales.view(torch.int32), self.words, self.scale_words,
            tile.view(self.whole[: problem.m], tile.rows), of_all, *strides, tile.view(b, tile.columns), b.view(torch.int32), scales_b, out,
            self.partials, self.finished, context.heap.bases, self.received, self.control, self.patient,
            context.rank, problem.m, problem.n, problem.k, tile.items(problem.m, problem.n), self.rows, problem.k // WORD_BYTES, self.groups,
            self.room, self.scale_room, self.warm_words,
            WORLD=world, PIECE=POLLED_WORDS, **tile.constants(problem),
        )  # fmt: skip

    def gathered_codes(self, a: Tensor, scales_a: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """A [m, k] and its scales as the last call has gathered them, in workspaces."""
        ordered = self.scales[: max(1, self.groups) * self.problem.world_size * self.rows].view(max(1, self.groups), -1)
        return self.whole[: self.problem.m], self.whole_scales(ordered[:, : self.problem.m], scales_a)

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: boxes keep their places, and a word carries the number of its call."""
        return {"rows": smaller.shard_rows, "whole": self.whole[: smaller.world_size * smaller.shard_rows]}

    def failure(self) -> str | None:
        """See Kernel.failure."""
        return super().failure() or note_of(self.patient, self.context.rank)
