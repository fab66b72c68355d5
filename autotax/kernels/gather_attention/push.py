"""push: one kernel. The first `comm` programs send K and V to the other ranks; all others attend to keys as they arrive.

A block of queries of one head attends to this rank's keys first, then to those of rank - 1, rank - 2 and so on, each group of
tokens after its flag. With windows a rank sends and awaits only groups that a window reaches. Programs take blocks from a counter, or with several dies in turn; `order` says which block is next.
Programs that have sent join the others.

Waits: a block waits for the groups of tokens that it sees. Programs that send never wait before their last store, and all
programs are resident, so every wait ends. The interpreter runs programs one after another; there a sender does not join.

The inbox has two slots, chosen by the parity of the epoch. A rank gets only the keys that its queries see, so flags of groups do
not free a slot. Instead the first program waits until every peer has begun the call.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.gemm import load_tile, next_item
from autotax.kernels.context import Context, all_resident, gdc_wait
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, arithmetic, copy, dot, flag_address, leave, signal, signal_all, translate, wait
from autotax.operators.gather_attention import GatherAttention

chiplet = arithmetic(tiling.chiplet)

ALIGNED = tl.constexpr(8)
"""Heads have multiples of this many elements."""


@triton.jit
def block_of(item, heads, blocks, BLOCK_FIRST: tl.constexpr, DIES: tl.constexpr):
    """The head and the block of queries of an item: all blocks of a head, then the next head; or with BLOCK_FIRST one block of
    every head, then the next block. The last block of a head comes first.

    The hardware deals programs to dies in turn. The order gives each die neighbouring blocks, or with BLOCK_FIRST neighbouring
    heads.
    """
    if BLOCK_FIRST:
        head = chiplet(item % heads, heads, DIES)
        place = item // heads
    else:
        at = chiplet(item, heads * blocks, DIES)
        head = at // blocks
        place = at % blocks
    return head, blocks - 1 - place


@triton.jit
def tokens_sent(source, reader, tokens, CAUSAL: tl.constexpr, CHUNKS: tl.constexpr):
    """How many of the first tokens that a rank holds of a sequence it sends to a reader: see `GatherAttention.parts`."""
    of_higher = tokens if CHUNKS == 2 else 0
    return tl.where(source < reader, tokens // CHUNKS, of_higher) if CAUSAL else tokens


@triton.jit
def number_of(rank, at, WORLD: tl.constexpr):
    """The number of a rank's first (`at` 0) or second chunk."""
    return tl.where(at == 0, rank, 2 * WORLD - 1 - rank)


@triton.jit
def reaches(
    reader, source, first, end, length, WINDOW: tl.constexpr, WORLD: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Whether the windows of any of the reader's queries reach one of the tokens first ... end - 1 of another rank.

    The windows of a later chunk reach the last tokens of a chunk: see `GatherAttention.parts`.
    """
    reached = end < 0
    for of_keys in tl.static_range(CHUNKS):
        for of_queries in tl.static_range(CHUNKS):
            later = number_of(reader, of_queries, WORLD) - number_of(source, of_keys, WORLD)
            hidden = tl.maximum(later * length - WINDOW + 1, 0)
            inside = (end > of_keys * length + hidden) & (first < of_keys * length + length)
            reached = reached | (inside & (later > 0) & (hidden < length))
    return reached


@triton.jit
def attend_blocks(
    state, q, k, v, row_k, row_v, rows, col, width, first, end, since, seen, tokens, scale,
    HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys first ... end - 1 of a span, tokens of one KV head, to the state of a block of queries, by an online softmax.

    K and V are row-major [tokens, kv_heads * head_dim], with `rows` rows and `width` columns. Token t of the span is row `row_k`
    + t of K, `row_v` + t of V. With EXTRA heads of K have that many elements more than those of V: `q` and `k` are pairs, for the
    first HEAD_DIM elements and for the rest. The state is (acc, top, total): the sum of exp2(score - top) * V [BLOCK_M, HEAD_DIM], the greatest
    score and the sum of exp2(score - top) [BLOCK_M], all float32. Scores are in units of log2(e), so that exp2 serves.

    MASKED: row i sees the tokens up to seen[i], and tokens from `tokens` on do not exist: their V may hold anything. Else every
    row sees all keys, which are whole blocks. With WINDOWED, too, row i sees no token before since[i], and perhaps none so far.
    """
    acc, top, total = state
    for at in tl.range(first, end, BLOCK_N):
        keys = load_tile(k[0], row_k + at, col, rows, width, width, BLOCK_N, HEAD_DIM, TMA, ALIGNED)
        scores = dot(q[0], tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TARGET)
        if EXTRA > 0:
            rest = load_tile(k[1], row_k + at, col + HEAD_DIM, rows, width, width, BLOCK_N, EXTRA, TMA, ALIGNED)
            scores = dot(q[1], tl.trans(rest), scores, TARGET)
        if MASKED:
            token = at + tl.arange(0, BLOCK_N)
            scores = tl.where(token[None, :] <= seen[:, None], scores, float("-inf"))
            if WINDOWED:
                scores = tl.where(token[None, :] >= since[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = higher
        if WINDOWED:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores * scale - base[:, None])
        fading = tl.exp2(top - base)
        total = total * fading + tl.sum(shares, 1)
        col_v = col
        width_v = width
        if EXTRA > 0:
            col_v = col // (HEAD_DIM + EXTRA) * HEAD_DIM
            width_v = width // (HEAD_DIM + EXTRA) * HEAD_DIM
        values = load_tile(v, row_v + at, col_v, rows, width_v, width_v, BLOCK_N, HEAD_DIM, TMA, ALIGNED)
        if MASKED:
            values = tl.where((at + tl.arange(0, BLOCK_N) < tokens)[:, None], values, 0.0)
        acc = dot(shares, values, acc * fading[:, None], TARGET)
        top = higher
    return acc, top, total


@triton.jit
def attend_span(
    state, q, k, v, row_k, row_v, rows, col, width, first, end, scale,
    HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys first ... end - 1, which every row sees. EVEN: both bounds are multiples of BLOCK_N; else `first` is."""
    whole = end // BLOCK_N * BLOCK_N
    state = attend_blocks(
        state, q, k, v, row_k, row_v, rows, col, width, first, whole, first, first, end, scale,
        HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, False, False, TMA, TARGET,
    )  # fmt: skip
    if not EVEN:
        seen = tl.full([BLOCK_M], end - 1, tl.int32)
        state = attend_blocks(
            state, q, k, v, row_k, row_v, rows, col, width, whole, end, seen, seen, end, scale,
            HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, True, False, TMA, TARGET,
        )  # fmt: skip
    return state


@triton.jit
def attend_window(
    state, q, k, v, row_k, row_v, rows, col, width, first, inner, outer, end, since, scale,
    HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys first ... end - 1, of which row i sees those from since[i] on. Every row sees the keys inner ... outer - 1, if
    there are any. All bounds but `end` are multiples of BLOCK_N.
    """
    inner = tl.minimum(tl.maximum(inner, first), end // BLOCK_N * BLOCK_N)
    outer = tl.minimum(tl.maximum(outer, inner), end // BLOCK_N * BLOCK_N)
    seen = tl.full([BLOCK_M], end - 1, tl.int32)
    state = attend_blocks(
        state, q, k, v, row_k, row_v, rows, col, width, first, inner, since, seen, end, scale,
        HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, True, True, TMA, TARGET,
    )  # fmt: skip
    state = attend_blocks(
        state, q, k, v, row_k, row_v, rows, col, width, inner, outer, since, seen, end, scale,
        HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, False, False, TMA, TARGET,
    )  # fmt: skip
    return attend_blocks(
        state, q, k, v, row_k, row_v, rows, col, width, outer, end, since, seen, end, scale,
        HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, True, True, TMA, TARGET,
    )  # fmt: skip


@triton.jit
def attend_own_window(
    state, q, k, v, base, rows, col, width, first, chunk, length, scale, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys of the queries' own chunk: the blocks of their own positions, then those before."""
    start = chunk * length
    end = tl.minimum(first + BLOCK_M, start + length)
    seen = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)  # rows behind the last query see its keys
    since = tl.maximum(seen - (WINDOW - 1), start)
    border = first // BLOCK_N * BLOCK_N
    state = attend_blocks(
        state, q, k, v, base, base, rows, col, width, border, end, since, seen, end, scale,
        HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, True, True, TMA, TARGET,
    )  # fmt: skip
    outermost = tl.maximum(first - (WINDOW - 1), start) // BLOCK_N * BLOCK_N
    inner = tl.cdiv(tl.maximum(first + BLOCK_M - WINDOW, start), BLOCK_N) * BLOCK_N
    return attend_window(
        state, q, k, v, base, base, rows, col, width, outermost, inner, border, border, since, scale,
        HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, TMA, TARGET,
    )  # fmt: skip


@triton.jit
def attend_earlier_chunk(
    state, q, k, v, row_k, row_v, rows, col, width, place, start, later, length, flags, flag, sent, source, epoch, control, scale,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys of a chunk that is `later` chunks before that of the queries, as far as their windows reach.

    The first query is the one at `place` of its chunk; the chunk of keys begins at token `start` of the span. With GROUP > 0 each
    group of tokens is awaited, of which `flag` is the first flag, and the source sends `sent` tokens at most.
    """
    hidden = place + later * length - (WINDOW - 1)
    if (later > 0) & (hidden < length):
        since = start + tl.maximum(hidden + tl.arange(0, BLOCK_M), 0)
        end = start + length
        first = (start + tl.maximum(hidden, 0)) // BLOCK_N * BLOCK_N
        inner = tl.cdiv(start + tl.maximum(hidden + BLOCK_M - 1, 0), BLOCK_N) * BLOCK_N
        if GROUP > 0:
            for group in tl.range(first // GROUP, tl.cdiv(end, GROUP), num_stages=1):
                pieces = tl.cdiv(tl.minimum(GROUP, sent - group * GROUP), PIECE)
                wait(flags + flag + group, epoch * pieces, source, flag + group, control, TARGET)
                state = attend_window(
                    state, q, k, v, row_k, row_v, rows, col, width, tl.maximum(first, group * GROUP), inner, end,
                    tl.minimum(end, group * GROUP + GROUP), since, scale, HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, TMA, TARGET,
                )  # fmt: skip
        else:
            state = attend_window(
                state, q, k, v, row_k, row_v, rows, col, width, first, inner, end, end, since, scale,
                HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, TMA, TARGET,
            )  # fmt: skip
    return state


COPY_ELEMENTS = tl.constexpr(8192)
"""Elements that one program moves at a time: 16 KiB."""


@triton.jit
def send_keys(
    k, v, inbox, inbox_v, flags, bases, epoch, rank, tokens, batch, width, width_v,
    WORLD: tl.constexpr, CAUSAL: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, COMM: tl.constexpr, GROUP: tl.constexpr,
    PIECE: tl.constexpr, EXTRA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Copies K and V to the peers, PIECE tokens at a time, and counts each piece in the flag of its group of GROUP tokens."""
    groups = tl.cdiv(tokens, GROUP)
    size = (batch * tokens).to(tl.int64) * width
    if EXTRA > 0:  # values have an inbox of their own
        landing = inbox + ((epoch & 1) * WORLD + rank).to(tl.int64) * size
        landing_v = inbox_v + ((epoch & 1) * WORLD + rank).to(tl.int64) * (batch * tokens) * width_v
    else:
        landing = inbox + ((epoch & 1) * WORLD + rank).to(tl.int64) * 2 * size
    for hop in tl.range(1, WORLD, num_stages=1):
        peer = (rank + hop) % WORLD
        sent = tokens_sent(rank, peer, tokens, CAUSAL, CHUNKS)
        pieces = tl.cdiv(sent, PIECE)
        remote = translate(landing, bases, rank, peer)
        for unit in tl.range(tl.program_id(0), batch * pieces, COMM, num_stages=1):
            sequence = unit // pieces
            token = unit % pieces * PIECE
            needed = True
            if WINDOW > 0:
                group = token // GROUP * GROUP
                needed = reaches(peer, rank, group, tl.minimum(group + GROUP, sent), tokens // CHUNKS, WINDOW, WORLD, CHUNKS)
            if needed:
                at = (sequence * tokens + token).to(tl.int64) * width
                elements = tl.minimum(PIECE, sent - token) * width
                copy(remote + at, k + at, 0, elements, COPY_ELEMENTS, ALIGNED)
                if EXTRA > 0:
                    at = (sequence * tokens + token).to(tl.int64) * width_v
                    elements = tl.minimum(PIECE, sent - token) * width_v
                    copy(translate(landing_v, bases, rank, peer) + at, v + at, 0, elements, COPY_ELEMENTS, ALIGNED)
                else:
                    copy(remote + size + at, v + at, 0, elements, COPY_ELEMENTS, ALIGNED)
                flag = (rank * batch + sequence) * groups + token // GROUP
                signal(flag_address(flags, flag, bases, rank, peer), 1, TARGET, "sys")


@triton.jit
def attend_block(
    item, q, k, v, inbox, inbox_v, out, lse, flags, control, epoch, rank, tokens, batch, q_heads, kv_heads, scale,
    WORLD: tl.constexpr, CAUSAL: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_FIRST: tl.constexpr, DIES: tl.constexpr, HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Computes a block of queries of one head. The last blocks see most keys and come first."""
    length = tokens // CHUNKS
    blocks = tl.cdiv(length, BLOCK_M)  # of a chunk: no block lies in two
    of_head, place = block_of(item, batch * q_heads, CHUNKS * blocks, BLOCK_FIRST, DIES)
    sequence = of_head // q_heads
    head = of_head % q_heads
    kv_head = head // (q_heads // kv_heads)
    chunk = place // blocks
    first = chunk * length + place % blocks * BLOCK_M
    base = sequence * tokens
    width = kv_heads * (HEAD_DIM + EXTRA)
    col = kv_head * (HEAD_DIM + EXTRA)
    at_q = head * (HEAD_DIM + EXTRA)
    width_q = q_heads * (HEAD_DIM + EXTRA)
    queries = (load_tile(q[0], base + first, at_q, batch * tokens, width_q, width_q, BLOCK_M, HEAD_DIM, TMA, ALIGNED),)
    if EXTRA > 0:
        rest = load_tile(q[1], base + first, at_q + HEAD_DIM, batch * tokens, width_q, width_q, BLOCK_M, EXTRA, TMA, ALIGNED)
        queries = (queries[0], rest)  # type: ignore[assignment]
    row = first + tl.arange(0, BLOCK_M)
    state = (
        tl.zeros([BLOCK_M, HEAD_DIM], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    if WINDOW > 0:
        state = attend_own_window(
            state, queries, k, v, base, batch * tokens, col, width, first, chunk, length, scale, WINDOW,
            HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, TMA, TARGET,
        )  # fmt: skip
    elif CAUSAL:
        seen_by_all = (first + 1) // BLOCK_N * BLOCK_N
        state = attend_blocks(
            state, queries, k, v, base, base, batch * tokens, col, width, 0, seen_by_all, row, row, tokens, scale,
            HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, False, False, TMA, TARGET,
        )  # fmt: skip
        state = attend_blocks(
            state, queries, k, v, base, base, batch * tokens, col, width, seen_by_all, tl.minimum(first + BLOCK_M, tokens), row, row,
            tokens, scale, HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, True, False, TMA, TARGET,
        )  # fmt: skip
    else:
        state = attend_span(
            state, queries, k, v, base, base, batch * tokens, col, width, 0, tokens, scale,
            HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, EVEN, TMA, TARGET,
        )  # fmt: skip
    groups = tl.cdiv(tokens, GROUP)
    SHARES: tl.constexpr = 2 if EXTRA == 0 else 1  # of the inbox: with equal heads a source's values lie behind its keys
    if WINDOW > 0:
        if CHUNKS == 2:  # the first chunk is not just before the second
            reach = number_of(rank, chunk, WORLD) - rank
            state = attend_earlier_chunk(
                state, queries, k, v, base, base, batch * tokens, col, width, first - chunk * length, 0, reach, length,
                flags, 0, 0, rank, epoch, control, scale, WINDOW, 0, PIECE, HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, TMA, TARGET,
            )  # fmt: skip
        for turn in tl.range(CHUNKS, WORLD * CHUNKS, num_stages=1):
            source = (rank + WORLD - turn // CHUNKS) % WORLD
            of_keys = turn % CHUNKS
            reach = number_of(rank, chunk, WORLD) - number_of(source, of_keys, WORLD)
            row_k = (((epoch & 1) * WORLD + source) * SHARES * batch + sequence) * tokens
            row_v = row_k
            if EXTRA == 0:
                row_v += batch * tokens
            state = attend_earlier_chunk(
                state, queries, inbox, inbox_v, row_k, row_v, 2 * SHARES * WORLD * batch * tokens, col, width,
                first - chunk * length, of_keys * length, reach, length, flags, (source * batch + sequence) * groups,
                tokens_sent(source, rank, tokens, CAUSAL, CHUNKS), source, epoch, control, scale,
                WINDOW, GROUP, PIECE, HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, TMA, TARGET,
            )  # fmt: skip
    for hop in tl.range(1, WORLD if WINDOW == 0 else 1, num_stages=1):
        source = (rank + WORLD - hop) % WORLD
        sent = tokens_sent(source, rank, tokens, CAUSAL, CHUNKS)
        seen = sent
        if CAUSAL:
            seen = tl.where((source > rank) & (chunk == 0), 0, sent)
        row_k = (((epoch & 1) * WORLD + source) * SHARES * batch + sequence) * tokens
        for group in tl.range(0, tl.cdiv(seen, GROUP), num_stages=1):
            flag = (source * batch + sequence) * groups + group
            pieces = tl.cdiv(tl.minimum(GROUP, sent - group * GROUP), PIECE)
            wait(flags + flag, epoch * pieces, source, flag, control, TARGET)
            row_v = row_k
            if EXTRA == 0:
                row_v += batch * tokens
            state = attend_span(
                state, queries, inbox, inbox_v, row_k, row_v, 2 * SHARES * WORLD * batch * tokens, col, width,
                group * GROUP, tl.minimum(group * GROUP + GROUP, seen), scale,
                HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, EVEN, TMA, TARGET,
            )  # fmt: skip
    acc, top, total = state
    inside = row < (chunk + 1) * length
    at = out + ((base + row).to(tl.int64)[:, None] * q_heads + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(at, rounded(acc / total[:, None], out.dtype.element_ty, TARGET), mask=inside[:, None])
    sums = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + of_head.to(tl.int64) * tokens + row, sums, mask=inside)


@triton.jit(do_not_specialize=["rank", "batch", "q_heads", "kv_heads"])
def push_attention_kernel(
    q, k, v, inbox, inbox_v, q_rest, k_rest, inbox_rest, k_sent, v_sent, landing, landing_v, out, lse, flags, begun, bases, control, rank, tokens, batch, q_heads, kv_heads, scale,
    WORLD: tl.constexpr, CAUSAL: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, COMM: tl.constexpr, GROUP: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_FIRST: tl.constexpr, DIES: tl.constexpr, HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`q`, `k`, `v` and `inbox` are views for loads (see `load_tile`); `k_sent`, `v_sent` and `landing` are the same tensors.

    Only with EXTRA there are `inbox_v` and `landing_v`, for values, and the views `..._rest` of the last elements of heads.
    """
    if EARLY:
        gdc_wait()
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0)
    if program == 0:
        signal_all(begun, rank, bases, rank, WORLD, False, TARGET)
    if program < COMM:
        send_keys(
            k_sent, v_sent, landing, landing_v, flags, bases, epoch, rank, tokens, batch, kv_heads * (HEAD_DIM + EXTRA),
            kv_heads * HEAD_DIM, WORLD, CAUSAL, CHUNKS, WINDOW, COMM, GROUP, PIECE, EXTRA, TARGET,
        )  # fmt: skip
    items = batch * q_heads * CHUNKS * tl.cdiv(tokens // CHUNKS, BLOCK_M)
    if (TARGET != "interpreter") | (program >= COMM):
        item = program
        if DIES == 1:
            item = next_item(control)
        while item < items:
            attend_block(
                item, (q, q_rest), (k, k_rest), v, (inbox, inbox_rest), inbox_v if EXTRA > 0 else inbox, out, lse, flags, control, epoch, rank, tokens, batch, q_heads, kv_heads, scale,
                WORLD, CAUSAL, CHUNKS, WINDOW, GROUP, PIECE, BLOCK_FIRST, DIES, HEAD_DIM, EXTRA, BLOCK_M, BLOCK_N, EVEN, TMA, TARGET,
            )  # fmt: skip
            if DIES == 1:
                item = next_item(control)
            else:
                item += tl.num_programs(0)
    if program == 0:
        for hop in tl.range(1, WORLD, num_stages=1):
            peer = (rank + hop) % WORLD
            wait(begun + peer, epoch, peer, peer, control, TARGET)
    leave(control, epoch, tl.num_programs(0), TARGET)


class AttentionKernel(Kernel[GatherAttention]):
    """The base of kernels that attend by themselves: what their launches have in common, and their log-sum-exps."""

    KEEPS_LSE: ClassVar[bool] = True

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.lse = context.empty((problem.batch, problem.q_heads, problem.shard_len), torch.float32)
        self.scale = math.log2(math.e) / math.sqrt(problem.head_dim)
        self.constants: dict[str, Any] = {
            "WORLD": problem.world_size, "CAUSAL": problem.mask == "causal", "CHUNKS": problem.chunks,
            "BLOCK_FIRST": config["order"] == "block_first", "BLOCK_N": int(config["block_n"]),
            "HEAD_DIM": problem.value_dim, "EXTRA": problem.head_dim - problem.value_dim,
            "WINDOW": problem.window if problem.windowed else 0,
        }  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The arguments `tokens`, `batch`, `q_heads` and `kv_heads` of a kernel."""
        return self.problem.shard_len, self.problem.batch, self.problem.q_heads, self.problem.kv_heads


class Push(AttentionKernel):
    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, tokens = problem.world_size, problem.shard_len
        dims = (problem.head_dim, problem.v_dim) if problem.v_dim else (problem.head_dim,)
        rows, kind = 2 * world * (3 - len(dims)) * problem.batch * tokens, context.dtype(problem)
        self.inbox = [context.heap.alloc((rows, problem.kv_heads * dim), kind) for dim in dims]
        self.flags = context.flags(world * problem.batch * ceil_div(tokens, config["group"]))
        self.begun = context.flags(world)
        self.tma = config["loads"] == "tma"
        self.constants |= {
            "COMM": config["comm"], "GROUP": config["group"], "PIECE": config["piece"], "DIES": config["dies"],
            "BLOCK_M": int(config["block_m"]), "EVEN": problem.chunk_len % int(config["block_n"]) == 0,
            "TMA": self.tma, "EARLY": context.hardware.launches_overlap, "num_warps": config["num_warps"],
            "num_stages": config["num_stages"],
        }  # fmt: skip

    def view(self, tensor: Tensor, rows: int, columns: int) -> Any:
        """The argument of `load_tile` for blocks of `rows` tokens and some elements of a head."""
        matrix = tensor.view(-1, math.prod(tensor.shape[2:])) if tensor.dim() > 2 else tensor
        return TensorDescriptor.from_tensor(matrix, [rows, columns]) if self.tma else matrix

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        context, constants, block_n = self.context, self.constants, self.constants["BLOCK_N"]
        # The interpreter needs one program that attends.
        programs = constants["COMM"] + 1 if context.interpreted else context.processors
        dim, extra, block_m = self.problem.value_dim, constants["EXTRA"], constants["BLOCK_M"]
        inbox, values = self.inbox[0], self.inbox[1] if extra else None
        apart: list[Any] = [None] * 4
        if values is not None:
            rest = (self.view(tensor, rows, extra) for tensor, rows in ((q, block_m), (k, block_n), (inbox, block_n)))
            apart = [self.view(values, block_n, dim), *rest]
        context.launch(
            push_attention_kernel, (programs,),
            self.view(q, block_m, dim), *(self.view(tensor, block_n, dim) for tensor in (k, v, inbox)), *apart,
            k, v, inbox, values, out, self.lse, self.flags, self.begun, context.heap.bases, self.control, context.rank,
            *self.sizes, self.scale, **constants, **all_resident(context),
        )  # fmt: skip
