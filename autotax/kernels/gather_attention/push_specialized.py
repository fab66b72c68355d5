"""Attention with roles for warps, and its variants `copy_engine` and `push_specialized`. For Hopper, in Gluon.

One warp of a program loads, two groups of four warps attend to 64 queries each, one warp may send. Blocks of K and V pass through
STAGES buffers each, with two barriers a buffer. A TMA load completes the barrier `full`; both groups arrive at `empty`. A group
multiplies the next block of keys before the values of this one, so that its softmax runs beside a product. The block with the
causal border comes first, then this rank's other blocks, then those of the other ranks.

Blocks have powers of two of columns. So if heads of K have more elements than those of V, their last EXTRA elements have buffers of
their own (`more`), and scores are sums of two products.

With WINDOW > 0 a query sees that many keys at most, its own and the last ones before. Blocks that no window of a tile reaches are
not loaded: both groups and the loader count the others alike (`span_of`, `next_block`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.push_specialized import send_shard
from autotax.kernels.all_gather_gemm.roles import layout_of, load_block, wait_first
from autotax.kernels.context import Context
from autotax.kernels.gather_attention.push import AttentionKernel, block_of, tokens_sent
from autotax.kernels.gather_attention.vendor import CopiedKeys
from autotax.kernels.primitives import EPOCH, leave
from autotax.operators.gather_attention import GatherAttention

ROWS = gl.constexpr(64)
"""Queries of a group: the rows that one Hopper instruction multiplies."""
GROUPS = gl.constexpr(2)


@gluon.jit
def tile_at(
    item, rank, tokens, batch, q_heads,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_FIRST: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The item-th tile: (sequence, query head), its first query, the end of the blocks of this rank's keys that it sees, and how
    many blocks of this rank's keys and of all keys it sees.

    The last tiles of a head see most keys and come first.
    """
    of_head, place = block_of(item, batch * q_heads, tokens // (GROUPS * ROWS), BLOCK_FIRST, 1)
    first = place * (GROUPS * ROWS)
    end = (first + GROUPS * ROWS) // BLOCK_N if CAUSAL else tokens // BLOCK_N
    own = end
    if WINDOW > 0:
        own = span_of(rank, rank, first, end * BLOCK_N, tokens, WORLD, CHUNKS, WINDOW, BLOCK_N)[1]
    every = own
    for hop in gl.static_range(1, WORLD):
        source = (rank + WORLD - hop) % WORLD
        seen = tokens_seen(source, rank, first, tokens, CAUSAL, CHUNKS)
        every += span_of(source, rank, first, seen, tokens, WORLD, CHUNKS, WINDOW, BLOCK_N)[1]
    return of_head, first, end, own, every


@gluon.jit
def position_of(rank, at, length, WORLD: gl.constexpr, CHUNKS: gl.constexpr):
    """The position in the sequence of a rank's token `at`. Chunks have `length` tokens."""
    number = rank
    if CHUNKS == 2:
        number = gl.where(at < length, rank, 2 * WORLD - 1 - rank)
    return number * length + at % length


@gluon.jit
def span_of(
    source, rank, first, end, tokens, WORLD: gl.constexpr, CHUNKS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """The first block of a rank's `end` first tokens that the windows of the queries from `first` on reach, and how many they reach.

    A window that reaches a rank's first chunk reaches all of its second one, as far as queries see it.
    """
    begin = 0
    if WINDOW > 0:
        length = tokens // CHUNKS
        since = position_of(rank, first, length, WORLD, CHUNKS) - (WINDOW - 1)
        hidden = gl.minimum(gl.maximum(since - source * length, 0), length)
        if CHUNKS == 2:
            later = gl.maximum(since - (2 * WORLD - 1 - source) * length, 0)
            hidden += gl.where(hidden == length, later, 0)
        begin = gl.minimum(hidden, end) // BLOCK_N
    return begin, end // BLOCK_N - begin


@gluon.jit
def next_block(
    hop, at, left, rank, first, tokens,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The block that the loader loads next: the hop of its rank, its first token there, and how many of that rank are left with it."""
    at += gl.where(hop == 0, -BLOCK_N, BLOCK_N)
    left -= 1
    while (left == 0) & (hop < WORLD - 1):
        hop += 1
        source = (rank + WORLD - hop) % WORLD
        seen = tokens_seen(source, rank, first, tokens, CAUSAL, CHUNKS)
        begin, left = span_of(source, rank, first, seen, tokens, WORLD, CHUNKS, WINDOW, BLOCK_N)
        at = begin * BLOCK_N
    return hop, at, left


@gluon.jit
def tokens_seen(source, rank, first, tokens, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr):
    """How many of another rank's tokens the queries from `first` on see: all that were sent, or none."""
    sent = tokens_sent(source, rank, tokens, CAUSAL, CHUNKS)
    if CAUSAL:
        sent = gl.where((source > rank) & (first < tokens // CHUNKS), 0, sent)
    return sent


@gluon.jit
def load_turn(
    k, v, row_k, row_v, col, col_v, buffers, turn, more_k, more,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """Loads a block of keys and one of values, as soon as their buffers are empty."""
    _queries, keys, values, _q_full, _q_empty, k_full, k_empty, v_full, v_empty = buffers
    stage = turn % STAGES
    phase = (turn // STAGES & 1) ^ 1
    mbarrier.wait(k_empty.index(stage), phase)
    mbarrier.expect(k_full.index(stage), BLOCK_N * (HEAD_DIM + EXTRA) * 2)
    load_block(k, [row_k, col], k_full.index(stage), keys.index(stage))
    if EXTRA > 0:
        load_block(more_k, [row_k, col + HEAD_DIM], k_full.index(stage), more[1].index(stage))
    mbarrier.wait(v_empty.index(stage), phase)
    mbarrier.expect(v_full.index(stage), BLOCK_N * HEAD_DIM * 2)
    load_block(v, [row_v, col_v], v_full.index(stage), values.index(stage))


@gluon.jit
def load_tiles(
    q, k, v, inbox_k, inbox_v, wider, buffers, more, flags, control, epoch, slot, share, chunks,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_FIRST: gl.constexpr, CHUNK: gl.constexpr, SENDS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, EXTRA: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The loader: the queries of each tile, then its blocks of keys and values. It waits once for each part of another rank's keys.

    A part is CHUNK rows; each rank has `chunks` of them. With SENDS the values have flags of their own, after those of the keys.
    With SENDS or EXTRA they have an inbox of their own. Else a source's values lie behind its keys.
    """
    queries, q_full, q_empty = buffers[0], buffers[3], buffers[4]
    items, rank, tokens, batch, q_heads, kv_heads = share
    turn = 0
    tile = 0
    complete = 0  # bits of the ranks of which all parts that this rank sees have arrived
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        of_head, first, end, own, _every = tile_at(item, rank, tokens, batch, q_heads, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, BLOCK_N)
        sequence = of_head // q_heads
        head = of_head % q_heads
        base = sequence * tokens
        col = head // (q_heads // kv_heads) * (HEAD_DIM + EXTRA)
        col_v = col // (HEAD_DIM + EXTRA) * HEAD_DIM if EXTRA > 0 else col
        mbarrier.wait(q_empty, (tile & 1) ^ 1)
        mbarrier.expect(q_full, GROUPS * ROWS * (HEAD_DIM + EXTRA) * 2)
        for group in gl.static_range(GROUPS):
            load_block(q, [base + first + group * ROWS, head * (HEAD_DIM + EXTRA)], q_full, queries.index(group))
            if EXTRA > 0:
                at = [base + first + group * ROWS, head * (HEAD_DIM + EXTRA) + HEAD_DIM]
                load_block(wider[0], at, q_full, more[0].index(group))
        for block in range(own):
            row = base + (end - 1 - block) * BLOCK_N
            load_turn(k, v, row, row, col, col_v, buffers, turn, wider[1], more, STAGES, BLOCK_N, HEAD_DIM, EXTRA)
            turn += 1
        for hop in range(1, WORLD):
            source = (rank + WORLD - hop) % WORLD
            seen = tokens_seen(source, rank, first, tokens, CAUSAL, CHUNKS)
            begin, blocks = span_of(source, rank, first, seen, tokens, WORLD, CHUNKS, WINDOW, BLOCK_N)
            waits = complete >> source & 1 == 0
            landed = (slot * WORLD + source) * batch * tokens
            for block in range(blocks):
                token = (begin + block) * BLOCK_N
                row = base + token
                opens = token % CHUNK == 0
                if WINDOW > 0:
                    opens = opens | (block == 0)
                if waits & opens:
                    wait_first(flags, source * chunks + row // CHUNK, 1, source, epoch, control, 1, TARGET)
                    if SENDS:
                        wait_first(flags, (WORLD + source) * chunks + row // CHUNK, 1, source, epoch, control, 1, TARGET)
                if SENDS or EXTRA > 0:
                    load_turn(
                        inbox_k, inbox_v, landed + row, landed + row, col, col_v, buffers, turn, wider[2], more,
                        STAGES, BLOCK_N, HEAD_DIM, EXTRA,
                    )  # fmt: skip
                else:
                    row += 2 * landed
                    load_turn(
                        inbox_k, inbox_v, row, row + batch * tokens, col, col_v, buffers, turn, wider[2], more,
                        STAGES, BLOCK_N, HEAD_DIM, EXTRA,
                    )  # fmt: skip
                turn += 1
            if (blocks > 0) & (batch == 1):
                complete |= 1 << source
        tile += 1  # noqa: SIM113


@gluon.jit
def send_keys(
    sent_k, sent_v, peer_k, peer_v, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BOXES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The sender of two ranks: the keys, then the values, in boxes that go round over all programs (see `send_shard`)."""
    send_shard(
        sent_k, (peer_k,), boxes, arrived[0], counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, 0, 1, BOXES, 0, TARGET
    )
    send_shard(
        sent_v, (peer_v,), boxes, arrived[1], counts + chunks, bases, flags + WORLD * chunks, rank, epoch, rows, cols, chunks,
        WORLD, CHUNK, 0, 1, BOXES, 0, TARGET,
    )  # fmt: skip


@gluon.jit
def attend_tiles(
    GROUP: gl.constexpr, out, lse, buffers, more, share, scale,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_FIRST: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 queries of each tile."""
    queries, keys, values, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    items, rank, tokens, batch, q_heads, _kv_heads = share
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = keys.dtype
    row = gl.arange(0, ROWS, gl.SliceLayout(1, of_scores))
    col = gl.arange(0, BLOCK_N, gl.SliceLayout(0, of_scores))
    mine = queries.index(GROUP)
    turn = 0
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        of_head, first, end, own, blocks = tile_at(item, rank, tokens, batch, q_heads, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, BLOCK_N)
        nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, of_scores)
        o = gl.zeros([ROWS, HEAD_DIM], gl.float32, of_out)
        mbarrier.wait(q_full, tile & 1)
        stage = turn % STAGES
        mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
        scores = warpgroup_mma(mine, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if EXTRA > 0:
            scores = warpgroup_mma(more[0].index(GROUP), more[1].index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage))
        if CAUSAL:
            border = row + GROUP * ROWS + (BLOCK_N - GROUPS * ROWS)
            scores = gl.where(col[None, :] <= border[:, None], scores, float("-inf"))
        if WINDOW > 0:
            hop = 0
            at = (end - 1) * BLOCK_N
            left = own
            length = tokens // CHUNKS
            # Row r sees column c of a block at position p if c >= r + since - p.
            since = position_of(rank, first, length, WORLD, CHUNKS) + GROUP * ROWS - (WINDOW - 1)
            hidden = since - position_of(rank, at, length, WORLD, CHUNKS)
            scores = gl.where(col[None, :] >= (row + hidden)[:, None], scores, float("-inf"))
        top = gl.max(scores, 1) * scale
        shares = gl.exp2(scores * scale - top[:, None])
        total = gl.sum(shares, 1)
        for _block in range(1, blocks):
            x = gl.convert_layout(shares.to(dtype), operand)
            now = turn % STAGES
            then = turn + 1
            stage = then % STAGES
            mbarrier.wait(k_full.index(stage), then // STAGES & 1)
            scores = warpgroup_mma(mine, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if EXTRA > 0:
                scores = warpgroup_mma(more[0].index(GROUP), more[1].index(stage).permute((1, 0)), scores, is_async=True)
            mbarrier.wait(v_full.index(now), turn // STAGES & 1)
            o = warpgroup_mma(x, values.index(now), o, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
            mbarrier.arrive(k_empty.index(stage))
            if WINDOW > 0:
                hop, at, left = next_block(hop, at, left, rank, first, tokens, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_N)
                hidden = since - position_of((rank + WORLD - hop) % WORLD, at, length, WORLD, CHUNKS)
                if hidden > 1 - ROWS:
                    scores = gl.where(col[None, :] >= (row + hidden)[:, None], scores, float("-inf"))
            higher = gl.maximum(top, gl.max(scores, 1) * scale)
            shares = gl.exp2(scores * scale - higher[:, None])
            fading = gl.exp2(top - higher)
            total = total * fading + gl.sum(shares, 1)
            top = higher
            o, x = warpgroup_mma_wait(num_outstanding=0, deps=(o, x))
            mbarrier.arrive(v_empty.index(now))
            o = o * gl.convert_layout(fading, gl.SliceLayout(1, of_out))[:, None]
            turn += 1
        x = gl.convert_layout(shares.to(dtype), operand)
        now = turn % STAGES
        mbarrier.wait(v_full.index(now), turn // STAGES & 1)
        o = warpgroup_mma(x, values.index(now), o, is_async=True)
        o, x = warpgroup_mma_wait(num_outstanding=0, deps=(o, x))
        mbarrier.arrive(v_empty.index(now))
        mbarrier.arrive(q_empty)
        turn += 1
        sequence = of_head // q_heads
        o = o / gl.convert_layout(total, gl.SliceLayout(1, of_out))[:, None]
        o = gl.convert_layout(o.to(dtype), wide)
        query = first + GROUP * ROWS
        rows = (sequence * tokens + query + gl.arange(0, ROWS, gl.SliceLayout(1, wide))).to(gl.int64) * q_heads + of_head % q_heads
        gl.store(out + rows[:, None] * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))[None, :], o)
        sums = (top + gl.log2(total)) * 0.6931471805599453
        gl.store(lse + gl.cast(of_head, gl.int64) * tokens + query + row, sums)
        tile += 1  # noqa: SIM113


@gluon.jit
def attend_by_roles(
    q, k, v, inbox_k, inbox_v, wider, sending, out, lse, flags, control, epoch, slot, rank, tokens, batch, q_heads, kv_heads, chunks, scale,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_FIRST: gl.constexpr, CHUNK: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, EXTRA: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """A program's tiles. `q` has boxes of 64 tokens of a head, `k`, `v` and the inboxes boxes of BLOCK_N.

    EXTRA > 0: `wider` are the views of the last elements of a head, of q, k and the inbox of keys.

    BOXES > 0: one more warp sends that many boxes of 64 x 64 in a turn. `sending` are its views of K and V, the views of both
    inboxes of the peer, counts [2, chunks] and the bases.
    """
    queries = gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, HEAD_DIM], q.layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, HEAD_DIM], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, HEAD_DIM], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    more = None, None
    if EXTRA > 0:
        more = (
            gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, EXTRA], wider[0].layout),
            gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, EXTRA], wider[1].layout),
        )
    buffers = (queries, keys, values, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    share = (batch * q_heads * (tokens // (GROUPS * ROWS)), rank, tokens, batch, q_heads, kv_heads)
    if BOXES > 0:
        sent_k, sent_v, peer_k, peer_v, counts, bases = sending
        boxes = gl.allocate_shared_memory(k.dtype, [BOXES, ROWS, ROWS], sent_k.layout)
        arrived_k = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
        arrived_v = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
        for at in gl.static_range(BOXES):
            mbarrier.init(arrived_k.index(at), count=1)
            mbarrier.init(arrived_v.index(at), count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_tiles, (0, out, lse, buffers, more, share, scale, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, STAGES, BLOCK_N, HEAD_DIM, EXTRA)),
                (attend_tiles, (1, out, lse, buffers, more, share, scale, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, STAGES, BLOCK_N, HEAD_DIM, EXTRA)),
                (load_tiles, (q, k, v, inbox_k, inbox_v, wider, buffers, more, flags, control, epoch, slot, share, chunks, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, CHUNK, True, STAGES, BLOCK_N, HEAD_DIM, EXTRA, TARGET)),
                (send_keys, (sent_k, sent_v, peer_k, peer_v, boxes, (arrived_k, arrived_v), counts, bases, flags, rank, epoch, batch * tokens, kv_heads * HEAD_DIM, chunks, WORLD, CHUNK, BOXES, TARGET)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_tiles, (0, out, lse, buffers, more, share, scale, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, STAGES, BLOCK_N, HEAD_DIM, EXTRA)),
                (attend_tiles, (1, out, lse, buffers, more, share, scale, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, STAGES, BLOCK_N, HEAD_DIM, EXTRA)),
                (load_tiles, (q, k, v, inbox_k, inbox_v, wider, buffers, more, flags, control, epoch, slot, share, chunks, WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, CHUNK, False, STAGES, BLOCK_N, HEAD_DIM, EXTRA, TARGET)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


REGISTERS = 168
"""Registers per thread at the launch: all of a processor's, over twelve warps. The kernel then redistributes them."""
TILE, BOX = 128, 64
"""Queries of a tile, and of a group of warps."""
ALL = gl.constexpr(1 << 30)
"""Rows that share a flag: all of a source's."""


@gluon.jit(do_not_specialize=["rank", "slot", "batch", "q_heads", "kv_heads"])
def attend_kernel(
    q, k, v, inbox, inbox_v, wider_q, wider_k, wider_inbox, out, lse, flags, ticket, control, slot, rank, tokens, batch, q_heads, kv_heads, scale,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_FIRST: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, EXTRA: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(ticket)
    attend_by_roles(
        q, k, v, inbox, inbox_v if EXTRA > 0 else inbox, (wider_q, wider_k, wider_inbox), None, out, lse, flags, control, epoch, slot, rank, tokens, batch, q_heads, kv_heads, 1, scale,
        WORLD, CAUSAL, CHUNKS, WINDOW, BLOCK_FIRST, ALL, 0, STAGES, BLOCK_N, HEAD_DIM, EXTRA, TARGET,
    )  # fmt: skip


class RolesKernel(AttentionKernel):
    """The base of kernels whose warps have roles."""

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.constants |= {"STAGES": config["num_stages"], "num_warps": 4, "maxnreg": REGISTERS}

    @property
    def tiles(self) -> int:
        """Tiles of 128 queries of one head."""
        return self.problem.batch * self.problem.q_heads * (self.problem.shard_len // TILE)

    def view(self, tensor: Tensor, tokens: int, columns: int) -> TensorDescriptor:
        """TMA boxes of some tokens and columns of a matrix with a row for each token."""
        box = [tokens, columns]
        matrix = tensor.view(-1, math.prod(tensor.shape[-2:])) if tensor.dim() > 2 else tensor
        return TensorDescriptor.from_tensor(matrix, box, layout_of(tuple(box), self.problem.dtype))


class CopyEngine(CopiedKeys, RolesKernel):
    """The copy engines send K and V to the other ranks; one kernel attends to keys as they arrive.

    The loading warp of a program waits for the flag of each other rank whose keys its queries see (see `CopiedKeys`). No program
    waits for another program of its kernel, so the grid may be of any size. A rank that sees no keys of another does not wait for
    it here; `open_slot` of a later call does. For sequences whose chunks are whole blocks.
    """

    def sent_to(self, peer: int) -> list[tuple[int, int]]:
        """Whole blocks: what a block holds before the first window is read, and must be numbers."""
        block = self.constants["BLOCK_N"]
        return [(first // block * block, end) for first, end in super().sent_to(peer)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        context, dim, block_n = self.context, self.problem.value_dim, self.constants["BLOCK_N"]
        slot = self.send_all(k, v)
        inboxes = [inbox[slot] for inbox in self.inbox]  # of fewer tokens, too, the second slot begins in the middle of the memory
        apart: list[Any] = [None] * 4  # views of an inbox of values, and of the last elements of heads of q and k
        if extra := self.constants["EXTRA"]:
            wider = ((q, BOX), (k, block_n), (inboxes[0], block_n))
            apart = [self.view(inboxes[1], block_n, dim), *(self.view(tensor, rows, extra) for tensor, rows in wider)]
        context.launch(
            attend_kernel, (self.tiles if self.config["grid"] == "tiles" else min(self.tiles, context.processors),),
            self.view(q, BOX, dim), *(self.view(keys, block_n, dim) for keys in (k, v, inboxes[0])), *apart,
            out, self.lse, self.arrived, self.ticket, self.control, 0, context.rank, *self.sizes, self.scale, **self.constants,
        )  # fmt: skip
        context.rejoin(self.beside)

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any] | None:
        """Any number of sequences, and of tokens where chunks are whole tiles."""
        changed = super().changes_for(smaller)
        if changed is None or smaller.chunk_len % TILE:
            return None
        shape = smaller.batch, smaller.q_heads, smaller.shard_len
        return changed | {"lse": self.lse.view(-1)[: math.prod(shape)].view(shape)}


@gluon.jit(do_not_specialize=["rank", "batch", "q_heads", "kv_heads", "chunks"])
def push_by_roles_kernel(
    q, k, v, inbox_k, inbox_v, sent_k, sent_v, peer_k, peer_v, out, lse, counts, flags, bases, control,
    rank, tokens, batch, q_heads, kv_heads, chunks, scale,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_FIRST: gl.constexpr, CHUNK: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    attend_by_roles(
        q, k, v, inbox_k, inbox_v, (None, None, None), (sent_k, sent_v, peer_k, peer_v, counts, bases), out, lse, flags, control, epoch, epoch & 1,
        rank, tokens, batch, q_heads, kv_heads, chunks, scale,
        WORLD, CAUSAL, CHUNKS, 0, BLOCK_FIRST, CHUNK, BOXES, STAGES, BLOCK_N, HEAD_DIM, 0, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushSpecialized(RolesKernel):
    """One kernel on two ranks: one warp of every program sends.

    Waits: the loading warp waits for the flags of the keys and of the values of each chunk of tokens that its queries see, hence
    for the sending warps of all programs of the peer. Sending warps never wait for a peer, and all programs are resident.

    Each rank sends all its tokens, in boxes of 64 x 64. The inboxes have two slots, chosen by the parity of the epoch. A slot is
    free only if every rank sees keys of the other in each call: this excludes a causal mask over contiguous shards.
    """

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows = problem.world_size, problem.batch * problem.shard_len
        shape = 2 * world * rows, problem.kv_heads * problem.head_dim
        self.inboxes = [context.heap.alloc(shape, context.dtype(problem)) for _ in range(2)]
        self.chunks = rows // int(config["chunk"])
        self.flags = context.flags(2 * world * self.chunks)
        self.counts = context.empty((2 * self.chunks,), torch.int32).zero_()
        self.constants |= {"CHUNK": config["chunk"], "BOXES": config["boxes"]}
        for name in ("EXTRA", "WINDOW"):
            del self.constants[name]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        context, dim, block_n = self.context, self.problem.head_dim, self.constants["BLOCK_N"]
        theirs = (context.heap.peer(inbox, 1 - context.rank) for inbox in self.inboxes)
        context.launch(
            push_by_roles_kernel, (min(self.tiles, context.processors),),
            self.view(q, BOX, dim), *(self.view(keys, block_n, dim) for keys in (k, v, *self.inboxes)),
            *(self.view(keys, BOX, BOX) for keys in (k, v, *theirs)),
            out, self.lse, self.counts, self.flags, context.heap.bases, self.control, context.rank,
            *self.sizes, self.chunks, self.scale, **self.constants,
        )  # fmt: skip
