"""scaled_specialized, scaled_push_words: `push_specialized`, `push_words` for e4m3. `scaled_roles` says how groups multiply.

The scales of a shard travel as words that carry the number of their call, before the first columns of the shard, which also
travel as words (`push_words`). Every program counts itself when it has received its part of both.

Waits: receivers wait only for peers, whose programs send their words before they wait for anything. For the rest see
`push_specialized`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.push_specialized import PushSpecialized, load_tiles, poll_tiles, send_shard
from autotax.kernels.all_gather_gemm.push_words import GROUP_M, THREADS, PushWords, load_a, load_b, receive_words, send_words
from autotax.kernels.all_gather_gemm.roles import X_ROWS, allocate, products_of, tile_at
from autotax.kernels.all_gather_gemm.scaled_shards import Quantiser
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, LIMIT, leave, note_missing
from autotax.kernels.scaled_roles import CODES, OVERLAPPING, await_launch, multiply_tile, store_boxes, with_scales
from autotax.kernels.tiling import staged_columns
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.inputs import DTYPES
from autotax.operators.scaled import as_words


@gluon.jit
def exchange_scales(scales, bases, control, rank, epoch, WORLD: gl.constexpr, SCALES: gl.constexpr, TARGET: gl.constexpr):
    """Sends a program's part of this rank's scales to every peer, then receives its part of theirs. A tensor's scale stays here.

    `scales` are (own, dense, words, size, room): `size` scales of this rank's shard, the place [WORLD, room] of all ranks'
    scales, and the inbox [2, WORLD, room]. Called by four warps.
    """
    own, dense, words, size, room = scales
    size = 0 if SCALES == "tensor" else size
    lanes = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    slot = (epoch & 1) * WORLD
    number = gl.cast(epoch, gl.int64) << 32
    step = gl.num_programs(0) * THREADS
    for first in range(gl.program_id(0) * THREADS, size, step):
        at = first + lanes
        bits = gl.load(own + at, mask=at < size, other=0.0).to(gl.int32, bitcast=True)
        place = words.to(gl.int64) - gl.load(bases + rank) + 8 * gl.cast((slot + rank) * room, gl.int64)
        for hop in gl.static_range(1, WORLD):
            theirs = (gl.load(bases + (rank + hop) % WORLD) + place).to(words.dtype)
            gl.store(theirs + at, number | (bits.to(gl.int64) & 0xFFFFFFFF), mask=at < size)
    limit = gl.load(control + LIMIT)
    for hop in gl.static_range(1, WORLD):
        source = (rank + hop) % WORLD
        for first in range(gl.program_id(0) * THREADS, size, step):
            at = first + lanes
            arriving = words + gl.cast((slot + source) * room, gl.int64) + at
            word = gl.load(arriving, mask=at < size, other=number, volatile=True)
            polls = 0
            while (gl.max((word >> 32 != epoch).to(gl.int32), 0) > 0) & (polls < limit):
                word = gl.load(arriving, mask=at < size, other=number, volatile=True)
                polls += 1
            if polls == limit:
                note_missing(control, source, 0, epoch, 0, TARGET)
                limit = polls * 0 + 1  # later waits of the call give up soon
            gl.store(dense + source * room + at, word.to(gl.int32).to(gl.float32, bitcast=True), mask=at < size)


@gluon.jit
def exchange_and_multiply(
    exchange, bases, epoch, of_all, n, out, stagings, buffers, share,
    WORLD: gl.constexpr, BY_WORDS: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr, SCALES: gl.constexpr,
    GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The first group: exchanges scales and words, then multiplies."""
    _, rank, rows, cols, _ = share
    if WORLD > 1:
        send_words(exchange, rank, epoch, rows, cols, WORLD, BY_WORDS, 1, False)
        exchange_scales(of_all[0], bases, exchange[8], rank, epoch, WORLD, SCALES, TARGET)
        receive_words(exchange, rank, epoch, rows, cols, WORLD, BY_WORDS, 1, TARGET)
    multiply_scaled(0, of_all, n, out, stagings, buffers, share, WORLD, INTERLEAVED, GROUP_M, ACROSS, SCALES, False, GROUPS, Y1, Y2, Y3, STAGES, 1, STRIPS, TARGET)


@gluon.jit
def multiply_scaled(
    GROUP: gl.constexpr, of_all, n, out, stagings, buffers, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr, SCALES: gl.constexpr, X_IS_B: gl.constexpr,
    GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, STRIPS: gl.constexpr,
    TARGET: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """`roles.multiply_tiles` for codes. `of_all` are the scales of A as `exchange_scales` has them, this rank, the rows of a
    shard and how many of these exist, and the scales of B. EARLY: see `multiply_tile`.
    """
    scales, rank, shard_rows, shard, scales_b = of_all
    own, dense, _, _, room = scales
    items, first, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y1, 32])
    side: gl.constexpr = gl.SliceLayout(0 if X_IS_B else 1, layout)
    groups = gl.cdiv(2 * cols, CODES)
    staging = stagings.index(GROUP)
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, col = tile_at(item, first, rows, n_tiles, WORLD, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N)
        row += 0 if X_IS_B else GROUP * X_ROWS
        col += GROUP * X_ROWS if X_IS_B else 0
        r = row + gl.arange(0, Y1 if X_IS_B else X_ROWS, layout=side)
        source = r // shard_rows
        inside = (r - source * shard_rows < shard) & (r < WORLD * rows)
        if SCALES == "tensor":
            of_a = own + r * 0
        else:
            place = gl.where(source == rank, own.to(gl.int64), dense.to(gl.int64) + 4 * (source * room).to(gl.int64))
            of_a = gl.where(inside, place + 4 * (r - source * shard_rows).to(gl.int64), own.to(gl.int64)).to(own.dtype)
        of_b = scales_b + col // CODES * groups
        if STRIPS == 0:
            one, two, three, turn = products_of(GROUP, buffers, cols, turn, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, True)
        else:
            one, two, three, turn = multiply_tile(
                GROUP, buffers, cols, turn, of_a, shard, of_b,
                SCALES, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, STRIPS, EARLY,
            )  # fmt: skip
        one = with_scales(one, of_a, inside, scales_b, col, n, SCALES, X_IS_B)
        store_boxes(out[0], one, staging, row, col, rows, X_IS_B, TARGET)
        if Y2:
            two = with_scales(two, of_a, inside, scales_b, col + Y1, n, SCALES, X_IS_B)
            store_boxes(out[1], two, staging, row, col + Y1, rows, X_IS_B, TARGET)
        if Y3:
            three = with_scales(three, of_a, inside, scales_b, col + Y1 + Y2, n, SCALES, X_IS_B)
            store_boxes(out[2], three, staging, row, col + Y1 + Y2, rows, X_IS_B, TARGET)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rank", "shard"])
def scaled_specialized_kernel(
    own, inbox, b1, b2, b3, out1, out2, out3, sent, peer1, peer2, peer3, peer4, peer5, peer6, peer7,
    a, stride, shard, landing, words, landings, room, received, own_scales, dense, scale_words, size, scale_room, scales_b,
    counts, bases, flags, control, rank, rows, cols, n, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, BOXES: gl.constexpr, PACE: gl.constexpr, INTERLEAVED: gl.constexpr,
    GROUP_M: gl.constexpr, ACROSS: gl.constexpr, SCALES: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr,
    Y3: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """See `push_specialized.gather_tiles`. Matrices are words of two codes, and `cols` their number a row."""
    gl.static_assert(not X_IS_B)
    await_launch()
    epoch = gl.load(control + EPOCH)
    BLOCK_M: gl.constexpr = GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = Y1 + Y2 + Y3
    b = (b1, b2, b3)
    out = (out1, out2, out3)
    peers = (peer1, peer2, peer3, peer4, peer5, peer6, peer7)
    landed = landing + gl.cast((epoch & 1) * WORLD * rows, gl.int64) * cols
    exchange = (a, stride, shard, landed, words, landings, room, received, control)
    of_all = ((own_scales, dense, scale_words, size, scale_room), rank, rows, shard, scales_b)
    n_tiles = gl.cdiv(n, BLOCK_N)
    items = gl.cdiv(WORLD * rows, BLOCK_M) * n_tiles if ACROSS else WORLD * (rows // BLOCK_M) * n_tiles
    buffers, stagings = allocate(own, out1, 1, GROUPS, Y1, Y2, Y3, STAGES, 1)
    boxes = gl.allocate_shared_memory(own.dtype, [BOXES, X_ROWS, own.block_shape[1]], sent.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    arrivals = gl.allocate_shared_memory(gl.int64, [K_GROUPS + 1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for at in gl.static_range(BOXES):
        mbarrier.init(arrived.index(at), count=1)
    mbarrier.init(taken, count=1)
    for group in gl.static_range(K_GROUPS + 1):
        mbarrier.init(arrivals.index(group), count=1)
    fence_async_shared()
    poll = (flags, received, control, epoch, chunks)
    load = (own, inbox, epoch)
    share = (items, rank, rows, cols, n_tiles)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (exchange_and_multiply, (exchange, bases, epoch, of_all, n, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, SCALES, GROUPS, Y1, Y2, Y3, STAGES, STRIPS, TARGET)),
                (load_tiles, (load, b, buffers, arrivals, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, False, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, arrivals, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [1, 1, 1],
            [88, 88, 88],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (exchange_and_multiply, (exchange, bases, epoch, of_all, n, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, SCALES, GROUPS, Y1, Y2, Y3, STAGES, STRIPS, TARGET)),
                (multiply_scaled, (1, of_all, n, out, stagings, buffers, share, WORLD, INTERLEAVED, GROUP_M, ACROSS, SCALES, False, GROUPS, Y1, Y2, Y3, STAGES, 1, STRIPS, TARGET)),
                (load_tiles, (load, b, buffers, arrivals, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, False, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, arrivals, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [4, 1, 1, 1],
            [232, 40, 40, 40],
        )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class Codes(Kernel[AllGatherGemm]):
    """Mixed into a kernel for 16 bits whose shards are then words of two codes. Tensors of a call: see `scaled_shards.Scaled`."""

    constants: dict[str, Any]

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(as_words(problem), config, context)
        self.problem = problem
        self.quantised = Quantiser(problem, problem.shard_rows, context)
        self.scale_room = ceil_div(max(1, self.quantised.groups) * problem.shard_rows, 16) * 16
        # Zeros are words of call 0, which does not exist.
        self.scale_words = context.heap.zeros((2, problem.world_size, self.scale_room), torch.int64)
        self.dense = context.empty((problem.world_size, self.scale_room), torch.float32)
        self.constants = self.constants | {"SCALES": problem.scales} | OVERLAPPING

    def __call__(self, a: Tensor, b: Tensor, *rest: Tensor) -> None:
        """See Kernel.__call__."""
        *of_a, scales_b, out = rest
        codes, scales = self.quantised(a, of_a[0] if of_a else None)
        word = DTYPES[self.problem.result]
        self.run(codes.view(word), scales, b.view(word), scales_b, out)

    def run(self, a: Tensor, scales: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """Enqueues a call. A and B are words of two codes."""
        raise NotImplementedError

    def places_of(self, scales: Tensor, rows: int) -> tuple[Any, ...]:
        """The arguments of a kernel that `exchange_scales` takes, for the scales of a shard of `rows` rows."""
        return scales, self.dense, self.scale_words, self.quantised.groups * rows, self.scale_room

    def gathered_scales(self, scales_a: Tensor) -> Tensor:
        """The scales of A as the last call has gathered them; `scales_a` are those of this rank. Not for scales of blocks."""
        if not self.quantised.groups:
            return scales_a
        self.context.copy(self.dense[self.context.rank, : len(scales_a)], scales_a.view(-1))
        return self.dense[:, : len(scales_a)].reshape(-1, 1)[: self.problem.m]

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any] | None:
        """See the kernel for 16 bits. A word of scales carries the number of its call."""
        return super().changes_for(as_words(smaller))


class ScaledSpecialized(Codes, PushSpecialized):
    """See PushSpecialized."""

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.constants = self.constants | {"STRIPS": config["strip"] // CODES.value}

    def staged(self, config: Config) -> int:
        """See PushSpecialized.staged."""
        return staged_columns(config["block_n"], config["num_stages"])

    def run(self, a: Tensor, scales: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """See Codes.run."""
        problem, context = self.problem, self.context
        context.launch(
            scaled_specialized_kernel, (context.processors,),
            self.views.of_a(a), self.landed, *self.views.of_b(b),
            *self.views.of_out(out.view(problem.world_size, problem.shard_rows, problem.n)),
            self.views.of(a, self.box_sent), *self.peers,
            a, a.stride(0), len(a), self.inbox, self.words, self.landings, self.room, self.received,
            *self.places_of(scales, len(a)), scales_b,
            self.counts, context.heap.bases, self.flags, self.control, context.rank, self.rows, problem.k // 2,
            problem.n, self.chunks,
            **self.constants,
        )  # fmt: skip


@gluon.jit
def exchange(
    words, scales, bases, control, rank, epoch, rows,
    WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, SCALES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Exchanges words and scales. Programs count received words when they have both."""
    send_words(words, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, True)
    exchange_scales(scales, bases, control, rank, epoch, WORLD, SCALES, TARGET)
    receive_words(words, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, TARGET)


@gluon.jit(do_not_specialize=["rank", "shard"])
def scaled_push_words_kernel(
    landed, b1, b2, b3, out1, out2, out3, a, stride, shard, landing, words, landings, room, own_scales, dense, scale_words, size, scale_room,
    scales_b, counts, bases, control, rank, rows, n,
    WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, SCALES: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr,
    Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """See `push_words_kernel`. Matrices are words of two codes, and COLS their number a row."""
    await_launch()
    epoch = gl.load(control + EPOCH)
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    b = (b1, b2, b3)
    out = (out1, out2, out3)
    n_tiles = gl.cdiv(n, BLOCK_N)
    buffers, stagings = allocate(landed, out1, 2, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)
    fence_async_shared()
    exchanged = (a, stride, shard, landing, words, landings, room, counts, control)
    scales = (own_scales, dense, scale_words, size, scale_room)
    of_all = (scales, rank, rows, shard, scales_b)
    # The gathered A is treated as one shard, because all its rows lie in one place.
    share = (gl.cdiv(WORLD * rows, BLOCK_M) * n_tiles, 0, WORLD * rows, COLS, n_tiles)
    goal = epoch * gl.num_programs(0)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (exchange, (exchanged, scales, bases, control, rank, epoch, rows, WORLD, COLS, K_GROUPS, SCALES, TARGET)),
                (multiply_scaled, (0, of_all, n, out, stagings, buffers, share, 1, False, GROUP_M, True, SCALES, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, 1, TARGET, True)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 1, 1],
            [168, 96, 96],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (exchange, (exchanged, scales, bases, control, rank, epoch, rows, WORLD, COLS, K_GROUPS, SCALES, TARGET)),
                (multiply_scaled, (0, of_all, n, out, stagings, buffers, share, 1, False, GROUP_M, True, SCALES, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, 1, TARGET, True)),
                (multiply_scaled, (1, of_all, n, out, stagings, buffers, share, 1, False, GROUP_M, True, SCALES, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, 1, TARGET, True)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 4, 1, 1],
            [160, 160, 64, 64],
        )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class ScaledPushWords(Codes, PushWords):  # type: ignore[misc]
    """The shards of PushWords are words of two codes."""

    def run(self, a: Tensor, scales: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """See Codes.run."""
        context = self.context
        context.launch(
            scaled_push_words_kernel, (context.processors,),
            self.view_of_a, *self.views.of_b(b), *self.views.of_out(out[None]),
            a, a.stride(0), len(a), self.landing, self.words, self.landings, self.room,
            *self.places_of(scales, len(a)), scales_b, self.counts, context.heap.bases, self.control, context.rank, self.rows, self.problem.n,
            **self.constants,
        )  # fmt: skip
