"""push_specialized: like `push`, but warp-specialized: of the warps of every program one sends, one polls, one loads, the others
multiply (see `roles`). For Hopper, in Gluon.

This rank's shard is sent in boxes of 64 x 64. They are distributed over the senders of all programs, chunk by chunk of rows and
in the order of K. TMA copies a box from memory to a buffer and from there to every peer, so sending takes no time of the
multiplying warps. A system-scope fence takes 5 us beside a GEMM. Therefore boxes are counted on this GPU, and the sender that
counts the last box of a K group signals the group to the peers.

Boxes are sent at PACE GB/s. Without pacing all boxes would arrive at about the same time, including those that are needed first.
The first BY_WORDS columns of a shard are needed before a box can arrive, so they travel as words: see `push_words`.

A poll takes a microsecond, so a separate warp polls. It signals the loader through the barriers `landed`, one per K group, and
runs at most one tile ahead (`taken`).

Waits: the polling warp of a program waits for the chunks of rows of its tiles, K group by K group. Thereby it waits for the
sending warps of all programs of a peer. Sending warps wait only for the clock that paces them. The inbox has two slots, see
`push`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.alignment import now_ns
from autotax.kernels.all_gather_gemm.push_words import NOTHING, receive_words, send_words
from autotax.kernels.all_gather_gemm.roles import (
    BLOCK_K,
    X_ROWS,
    Views,
    allocate,
    load_block,
    load_groups,
    load_parts,
    multiply_tiles,
    padded,
    store_block,
    tile_at,
    wait_first,
)
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel, around_the_border
from autotax.kernels.primitives import EPOCH, arithmetic, flag_address, leave, settle
from autotax.kernels.tiling import GROUP_ROWS, MOST_RANKS
from autotax.operators.all_gather_gemm import AllGatherGemm

box_row = arithmetic(tiling.box_row)
box_strip = arithmetic(tiling.box_strip)
boxes_of = arithmetic(tiling.boxes_of)

K_ALIGNMENT = gl.constexpr(tiling.K_ALIGNMENT)


@gluon.jit
def tell_all(flags, index, epoch, bases, rank, WORLD: gl.constexpr, TARGET: gl.constexpr):
    """Sets flag `index` of every other rank to the epoch. Calls of fewer rows may skip flags; nobody waits for a skipped flag."""
    settle(TARGET)
    gl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for hop in gl.static_range(1, WORLD):
        gl.atomic_xchg(flag_address(flags, index, bases, rank, (rank + hop) % WORLD), epoch, sem="relaxed", scope="sys")


@gluon.jit
def send_shard(
    sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, BOXES: gl.constexpr, PACE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The sender: sends BOXES boxes of this rank's shard per turn to every peer, chunk by chunk of rows. Turns rotate
    over all programs. `peers` are views of the inboxes by hop. `counts` [chunks, K_GROUPS] counts the boxes written
    in this call. The first BY_WORDS columns travel as words.
    """
    cols -= BY_WORDS
    span = gl.cdiv(cols, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT
    strips = gl.cdiv(cols, BLOCK_K)
    count = rows // X_ROWS * strips
    landing = ((epoch & 1) * WORLD + rank) * rows
    start = now_ns(TARGET)
    if PACE:
        start += gl.cast(rows, gl.int64) * (2 * BY_WORDS * (WORLD - 1)) // PACE  # time that the words take on the links
    turn = 0
    if WORLD > 1:
        for first in range(gl.program_id(0) * BOXES, count, gl.num_programs(0) * BOXES):
            for at in gl.static_range(BOXES):
                if first + at < count:
                    place = [box_row(first + at, rows, strips, CHUNK), BY_WORDS + box_strip(first + at, rows, strips, CHUNK) * BLOCK_K]
                    mbarrier.expect(arrived.index(at), X_ROWS * BLOCK_K * 2)
                    load_block(sent, place, arrived.index(at), boxes.index(at))
            if PACE:
                due = start + gl.cast(first, gl.int64) * (X_ROWS * BLOCK_K * 2 * (WORLD - 1)) // PACE
                while now_ns(TARGET) < due:
                    pass
            for at in gl.static_range(BOXES):
                if first + at < count:
                    row = landing + box_row(first + at, rows, strips, CHUNK)
                    col = BY_WORDS + box_strip(first + at, rows, strips, CHUNK) * BLOCK_K
                    mbarrier.wait(arrived.index(at), turn & 1)
                    for hop in gl.static_range(WORLD - 1):
                        store_block(peers[hop], [row, col], boxes.index(at))
            # Waits until all boxes are written, not only read. The proxy fence then orders them before counts and signals.
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
            settle(TARGET)
            for at in gl.static_range(BOXES):
                if first + at < count:
                    group = box_strip(first + at, rows, strips, CHUNK) * BLOCK_K // span
                    chunk = box_row(first + at, rows, strips, CHUNK) // CHUNK
                    written = gl.atomic_add(counts + chunk * K_GROUPS + group, 1, sem="acq_rel", scope="gpu") + 1
                    if written == boxes_of(group, chunk, rows, cols, span, CHUNK):
                        gl.store(counts + chunk * K_GROUPS + group, 0)  # for the next call
                        tell_all(flags, (rank * chunks + chunk) * K_GROUPS + group, epoch, bases, rank, WORLD, TARGET)
            turn += 1


@gluon.jit
def poll_tiles(
    poll, landed, taken, share,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The poller: for each tile, releases as many K groups at a time as have arrived for all its rows."""
    flags, count, control, epoch, chunks = poll
    items, rank, rows, cols, n_tiles = share
    cols -= BY_WORDS
    groups = gl.cdiv(cols, gl.cdiv(cols, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT)
    ROWS: gl.constexpr = X_ROWS if ACROSS else BLOCK_M
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, _ = tile_at(item, rank, rows, n_tiles, WORLD, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N)
        mbarrier.wait(taken, (tile & 1) ^ 1)
        if BY_WORDS:
            if (row // rows != rank) | ((row + BLOCK_M - 1) // rows != rank):
                wait_first(count, 0, 1, rank, epoch * gl.num_programs(0), control, 2, TARGET)
            mbarrier.arrive(landed.index(K_GROUPS))
        ready = 0
        while ready < groups:
            more = groups - ready
            for part in gl.static_range(BLOCK_M // ROWS):
                source = (row + part * ROWS) // rows
                local = row + part * ROWS - source * rows
                if source != rank:
                    for chunk in range(local // CHUNK, (local + ROWS - 1) // CHUNK + 1):
                        more = wait_first(flags, (source * chunks + chunk) * K_GROUPS + ready, more, source, epoch, control, 1, TARGET)
            for group in range(ready, ready + more):
                mbarrier.arrive(landed.index(group))
            ready += more
        tile += 1  # noqa: SIM113


@gluon.jit
def load_tiles(
    load, b, buffers, landed, taken, share,
    WORLD: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr,
    X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loader: for each tile, loads a K group once it has arrived."""
    own, inbox, epoch = load
    x, y, full, empty = buffers
    items, rank, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    span = gl.cdiv(cols - BY_WORDS, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT
    slot = (epoch & 1) * WORLD * rows
    turn = 0
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, col = tile_at(item, rank, rows, n_tiles, WORLD, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N)
        mine, end = rank * rows, (rank + 1) * rows
        # Whether the first and the last rows of the tile belong to this rank; they may belong to different shards.
        own_first = (row >= mine) & (row < end)
        own_last = (row + BLOCK_M - X_ROWS >= mine) & (row + BLOCK_M - X_ROWS < end)
        awaited = 0  # the first column whose arrival has not been awaited
        for at in range(0, cols, BLOCK_K):
            if at >= awaited:
                group = K_GROUPS if at < BY_WORDS else (at - BY_WORDS) // span
                mbarrier.wait(landed.index(group), tile & 1)
                awaited = BY_WORDS if at < BY_WORDS else BY_WORDS + (group + 1) * span
                mbarrier.arrive(taken, pred=awaited >= cols)
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            if X_IS_B:
                load_groups(b[0], col, at, loaded, x, stage, 0, GROUPS, GROUPS)
                if own_first:
                    load_parts((own, own, own), row - mine, at, loaded, y, stage, Y1, Y2, Y3)
                else:
                    load_parts((inbox, inbox, inbox), slot + row, at, loaded, y, stage, Y1, Y2, Y3)
            else:
                load_parts(b, col, at, loaded, y, stage, Y1, Y2, Y3)
                together: gl.constexpr = 1 if ACROSS else GROUPS
                if own_first:
                    load_groups(own, row - mine, at, loaded, x, stage, 0, together, GROUPS)
                else:
                    load_groups(inbox, slot + row, at, loaded, x, stage, 0, together, GROUPS)
                if ACROSS:
                    if own_last:
                        load_groups(own, row - mine, at, loaded, x, stage, 1, GROUPS, GROUPS)
                    else:
                        load_groups(inbox, slot + row, at, loaded, x, stage, 1, GROUPS, GROUPS)
            turn += 1
        tile += 1  # noqa: SIM113


@gluon.jit
def exchange_and_multiply(
    exchange, epoch, out, stagings, buffers, share,
    WORLD: gl.constexpr, BY_WORDS: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr,
    Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The first group: exchanges words, then multiplies."""
    _, rank, rows, cols, _ = share
    if BY_WORDS > 0 and WORLD > 1:
        send_words(exchange, rank, epoch, rows, cols, WORLD, BY_WORDS, 1, False)
        receive_words(exchange, rank, epoch, rows, cols, WORLD, BY_WORDS, 1, TARGET)
    multiply_tiles(0, out, stagings, buffers, share, WORLD, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, 1, TARGET)


@gluon.jit
def gather_tiles(
    own, inbox, b, out, sent, peers, exchange, counts, bases, flags, control, rank, epoch, rows, cols, n, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, BOXES: gl.constexpr, PACE: gl.constexpr, INTERLEAVED: gl.constexpr,
    GROUP_M: gl.constexpr, ACROSS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    """Computes a program's part of C = gather(A) @ B.T, with A sharded along M: sends its boxes, computes its tiles.

    `rows` is a multiple of 64, and without ACROSS also a multiple of the rows of a tile. A shard may have fewer rows;
    the missing ones count as zeros. `own` [shard, cols], `inbox` [2 * WORLD * rows, cols], `b` [n, cols] and `out`
    [WORLD, shard, n] are TMA descriptors of a tile's operands. `b` and `out` have one descriptor per part (X has one
    part). `exchange` is passed to `push_words.send_words`. `sent` is the descriptor of boxes of this rank's shard;
    `peers` are those of the peers' inboxes by hop. A tile may span shards only if X is its block of A. Flags are
    [WORLD, chunks, K_GROUPS], with as many chunks as the largest call has.
    """
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    n_tiles = gl.cdiv(n, BLOCK_N)
    items = gl.cdiv(WORLD * rows, BLOCK_M) * n_tiles if ACROSS else WORLD * (rows // BLOCK_M) * n_tiles
    buffers, stagings = allocate(own, out[0], 1, GROUPS, Y1, Y2, Y3, STAGES, 1)
    boxes = gl.allocate_shared_memory(own.dtype, [BOXES, X_ROWS, BLOCK_K], sent.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [K_GROUPS + 1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for at in gl.static_range(BOXES):
        mbarrier.init(arrived.index(at), count=1)
    mbarrier.init(taken, count=1)
    for group in gl.static_range(K_GROUPS + 1):
        mbarrier.init(landed.index(group), count=1)
    fence_async_shared()
    poll = (flags, exchange[7], control, epoch, chunks)
    load = (own, inbox, epoch)
    share = (items, rank, rows, cols, n_tiles)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (exchange_and_multiply, (exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (load_tiles, (load, b, buffers, landed, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, landed, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [1, 1, 1],
            [88, 88, 88],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (exchange_and_multiply, (exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (multiply_tiles, (1, out, stagings, buffers, share, WORLD, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, 1, TARGET)),
                (load_tiles, (load, b, buffers, landed, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, landed, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [4, 1, 1, 1],
            [232, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        # Two products side by side need more registers. The other warps then spill one or two registers.
        MOST: gl.constexpr = 160 if Y2 else 152
        REST: gl.constexpr = 32 if Y2 else 56
        gl.warp_specialize(
            [
                (exchange_and_multiply, (exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (multiply_tiles, (1, out, stagings, buffers, share, WORLD, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, 1, TARGET)),
                (multiply_tiles, (2, out, stagings, buffers, share, WORLD, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, 1, TARGET)),
                (load_tiles, (load, b, buffers, landed, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, landed, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [4, 4, 1, 1, 1],
            [MOST, MOST, REST, REST, REST],
        )  # fmt: skip


MOST_REGISTERS = {1: 168, 2: 168, 3: 128}
"""Registers per thread at the launch, by the number of multiplying groups. It is all that a processor has, divided
over all warps. The kernel then redistributes them among the warps.
"""
MOST_PEERS = MOST_RANKS - 1


@gluon.jit(do_not_specialize=["rank", "shard"])
def push_specialized_kernel(
    own, inbox, b1, b2, b3, out1, out2, out3, sent, peer1, peer2, peer3, peer4, peer5, peer6, peer7,
    a, stride, shard, landing, words, landings, room, received, counts, bases, flags, control, rank, rows, cols, n, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, BOXES: gl.constexpr, PACE: gl.constexpr, INTERLEAVED: gl.constexpr,
    GROUP_M: gl.constexpr, ACROSS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    gather_tiles(
        own, inbox, (b1, b2, b3), (out1, out2, out3), sent, (peer1, peer2, peer3, peer4, peer5, peer6, peer7),
        (a, stride, shard, landing + gl.cast((epoch & 1) * WORLD * rows, gl.int64) * cols, words, landings, room, received, control),
        counts, bases, flags, control, rank, epoch, rows, cols, n, chunks,
        WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushSpecialized(Kernel[AllGatherGemm]):
    rows: int
    inbox: Tensor
    landed: TensorDescriptor
    peers: list[TensorDescriptor | None]

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.views = Views(config, problem.dtype, self.staged(config))
        self.box_sent = [GROUP_ROWS, tiling.BLOCK_K]
        self.chunks = ceil_div(rows, config["chunk_rows"])
        self.flags = context.flags(world * self.chunks * config["k_groups"])
        self.counts = context.empty((self.chunks * config["k_groups"],), torch.int32).zero_()
        columns = config["by_words"]
        self.room = rows * columns // 8
        self.words = context.heap.alloc((2 * world * max(self.room, 1), 2), torch.int64).fill_(NOTHING)
        self.received = context.empty((1,), torch.int32).zero_()
        places = [context.heap.peer(self.words, (context.rank + hop) % world).data_ptr() for hop in range(1, world)]
        self.landings = torch.tensor(places or [0], dtype=torch.int64, device=self.words.device)
        vars(self).update(self.landing(context.heap.alloc((2 * world * rows, cols), context.dtype(problem)), rows))
        self.constants = {
            "WORLD": world, "CHUNK": config["chunk_rows"], "BY_WORDS": columns, "K_GROUPS": config["k_groups"],
            "BOXES": config["boxes"], "PACE": config["pace"], "INTERLEAVED": config["order"] == "interleaved",
            "GROUP_M": config["group_m"], "ACROSS": rows % config["block_m"] != 0, **self.views.constants,
            "maxnreg": MOST_REGISTERS[self.views.groups],
        }  # fmt: skip

    def staged(self, config: Config) -> int:  # noqa: ARG002
        """Most columns of C that a group of warps stages at a time."""
        return tiling.PART_ROWS

    def landing(self, inbox: Tensor, rows: int) -> dict[str, Any]:
        """The attributes that depend on `rows` rows per rank: the inbox [2 * world size * rows, cols] and its views."""
        context, world = self.context, self.problem.world_size
        inboxes = [context.heap.peer(inbox, (context.rank + hop) % world) for hop in range(1, world)]
        peers = padded([self.views.of(peer, self.box_sent) for peer in inboxes], MOST_PEERS, None)
        return {"inbox": inbox, "rows": rows, "landed": self.views.of_a(inbox), "peers": peers}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, context = self.problem, self.context
        context.launch(
            push_specialized_kernel, (context.processors,),
            self.views.of_a(a), self.landed, *self.views.of_b(b),
            *self.views.of_out(out.view(problem.world_size, problem.shard_rows, problem.n)),
            self.views.of(a, self.box_sent), *self.peers,
            a, a.stride(0), len(a), self.inbox, self.words, self.landings, self.room, self.received,
            self.counts, context.heap.bases, self.flags, self.control, context.rank, self.rows, problem.shard_cols,
            problem.n, self.chunks,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any] | None:
        """Supports any number of rows: flags hold the epoch, and each flag belongs to one source for any number of
        rows. Boxes have 64 rows; rows that a shard lacks are zeros whose results are not stored.
        """
        world, cols, block = smaller.world_size, smaller.shard_cols, self.config["block_m"]
        rows = ceil_div(smaller.shard_rows, GROUP_ROWS) * GROUP_ROWS
        if (rows if self.constants["X_IS_B"] else world * rows) % block:
            return None
        inbox = around_the_border(self.inbox, world * rows * cols)
        if inbox is None:
            return None
        # ACROSS wherever it is allowed, so that one kernel serves all numbers of rows.
        constants = self.constants | {"ACROSS": not self.constants["X_IS_B"] and block > GROUP_ROWS}
        return self.landing(inbox.view(2 * world * rows, cols), rows) | {"constants": constants}
