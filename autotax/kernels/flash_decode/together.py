"""LL words that are waited for with as few trips as there can be, for kernels in which nothing else is left to do.

As `words` has them, with two differences. Log-sum-exps are polled together with the results they belong to, which costs more
polling and saves a trip to the memory. And what a wait or a push must know beside its words, which other kernels load when
they get there, is loaded when the kernel begins: by then it has often left the L2.
"""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.words import absent, pack, pack_rows, rounded, unpack_rows
from autotax.kernels.primitives import ERROR, note_missing


@triton.jit
def distances(bases, rank, WORLD: tl.constexpr):
    """How far the heap of each rank is from the own one, in bytes; the next rank first, the own one last."""
    own = tl.load(bases + rank)
    found = ()
    for hop in tl.static_range(1, WORLD + 1):
        found += (tl.load(bases + (rank + hop) % WORLD) - own,)  # type: ignore[assignment]
    return found


@triton.jit
def push_part(
    o, lse, first, part, inbox_o, inbox_lse, away, epoch, rank, arriving,
    WORLD: tl.constexpr, PAYLOAD: tl.constexpr, SCATTER: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`exchange.push_result` with LL, of columns part * BLOCK_D and following, to ranks that are `distances` away."""
    o = rounded(o, PAYLOAD, TARGET)
    slot = ((epoch & 1) * WORLD + rank).to(tl.int64) * arriving
    if SCATTER:
        owner = first // arriving
        at = slot + first % arriving + tl.arange(0, BLOCK_G)
        far = tl.cast(0, tl.int64)
        for hop in tl.static_range(WORLD):
            far += tl.where((rank + hop + 1) % WORLD == owner, away[hop], 0)
        send_part(o, lse, part, inbox_o, inbox_lse, far, at, epoch, PAYLOAD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    else:
        at = slot + first + tl.arange(0, BLOCK_G)
        for hop in tl.static_range(WORLD):
            send_part(o, lse, part, inbox_o, inbox_lse, away[hop], at, epoch, PAYLOAD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit
def send_part(
    o, lse, part, inbox_o, inbox_lse, far, at, epoch, PAYLOAD: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the words of a part to rows `at` (int64 [BLOCK_G]) of the inbox that is `far` away, the log-sum-exps with the first part."""
    there_o = (inbox_o.to(tl.int64) + far).to(inbox_o.dtype)
    there_lse = (inbox_lse.to(tl.int64) + far).to(inbox_lse.dtype)
    WORDS: tl.constexpr = HEAD_DIM if tl.float32 == PAYLOAD else (HEAD_DIM + 1) // 2
    BLOCK_W: tl.constexpr = BLOCK_D if tl.float32 == PAYLOAD else BLOCK_D // 2
    g = tl.arange(0, BLOCK_G)
    w = part * BLOCK_W + tl.arange(0, BLOCK_W)
    # The base comes from an integer: see `attention.store_rows`.
    there = tl.multiple_of(there_o + at[:, None] * WORDS + w[None, :], (8, 16 if WORDS % 2 == 0 else 8))
    tl.store(there, pack_rows(o, epoch, PAYLOAD, BLOCK_G, BLOCK_D), mask=(g < GROUP)[:, None] & (w < WORDS)[None, :])
    tl.store(there_lse + at, pack(lse, epoch), mask=(g < GROUP) & (part == 0))


@triton.jit
def merge_part(
    o, lse, first, part, rows, epoch, rank, control, limit,
    FROM_RANKS: tl.constexpr, PAYLOAD: tl.constexpr, PIECES: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`words.merge_words` of columns part * BLOCK_D and following; `limit` is that of the control block."""
    WORDS: tl.constexpr = HEAD_DIM if tl.float32 == PAYLOAD else (HEAD_DIM + 1) // 2
    BLOCK_W: tl.constexpr = BLOCK_D if tl.float32 == PAYLOAD else BLOCK_D // 2
    g = tl.arange(0, BLOCK_G)
    w = part * BLOCK_W + tl.arange(0, BLOCK_W)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for block in tl.range(0, PIECES, CHUNK, num_stages=1):
        piece = block + tl.arange(0, CHUNK)
        there = (piece < PIECES)[:, None] & (g < GROUP)[None, :]
        row = first + piece.to(tl.int64)[:, None] * rows + g[None, :]
        at = o + row[:, :, None] * WORDS + w[None, None, :]
        inside = there[:, :, None] & (w < WORDS)[None, None, :]
        words, sums = poll_both(at, inside, lse + row, there, epoch, piece, rank, control, limit, FROM_RANKS, TARGET)
        shares = tl.where(there, sums.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
        new_top = tl.maximum(top, tl.max(shares, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(shares - base[None, :])
        shrink = tl.exp2(top - base)
        values = unpack_rows(words, PAYLOAD, CHUNK, BLOCK_G, BLOCK_D)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * values, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    some = total > 0.0
    return acc / tl.where(some, total, 1.0)[:, None], tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def poll_both(
    at, mask, at_lse, mask_lse, epoch, piece, rank, control, limit, FROM_RANKS: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """`words.poll` for results [CHUNK, BLOCK_G, ...] and their log-sum-exps [CHUNK, BLOCK_G] at once; `piece` is [CHUNK]."""
    nothing = epoch.to(tl.int64) << 32
    words = tl.load(at, mask=mask, other=nothing, volatile=True)
    sums = tl.load(at_lse, mask=mask_lse, other=nothing, volatile=True)
    missing = absent(words, epoch, TARGET) | absent(sums, epoch, TARGET)
    polls = 0
    while (missing != 0) & (polls < limit):
        words = tl.load(at, mask=mask, other=nothing, volatile=True)
        sums = tl.load(at_lse, mask=mask_lse, other=nothing, volatile=True)
        missing = absent(words, epoch, TARGET) | absent(sums, epoch, TARGET)
        polls += 1
        if polls % 1024 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                polls = limit
    if missing != 0:
        first, seen = earliest(words, piece[:, None, None], epoch)
        first_sum, seen_sum = earliest(sums, piece[:, None], epoch)
        if first_sum < first:
            seen = seen_sum
        first = tl.minimum(first, first_sum)
        note_missing(control, first if FROM_RANKS else rank, first, epoch, seen)
    return words, sums


@triton.jit
def earliest(words, piece, epoch):
    """The first piece of which a word is not of this call, and what such a word holds; 2147483647 if there is none."""
    found = (words >> 32).to(tl.int32)
    first = tl.min(tl.where(found != epoch, piece, 2147483647))
    return first, tl.max(tl.where((found != epoch) & (piece == first), found, -2147483648))


@triton.jit
def store_part(
    o, out, at, part, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Writes columns part * BLOCK_D and following of rows `at` [BLOCK_G] of out [rows, HEAD_DIM], converted to its type."""
    g = tl.arange(0, BLOCK_G)
    d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out + at[:, None] * HEAD_DIM + d[None, :], o.to(out.dtype.element_ty), mask=inside)
