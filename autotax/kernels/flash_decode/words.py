"""LL words: partial results that need neither fence nor flag, because every word says itself which call it belongs to.

A word is 8 bytes, written by one store: 4 bytes of data in the low half, the epoch of the call in the high half. The reader
loads the words it needs again and again until each carries the epoch. Data are one float32, or two neighbouring columns
rounded to a 16-bit PAYLOAD type; log-sum-exps are always float32. A row of head_dim columns is WORDS words,
head_dim or half as many, rounded up.

Why no stale word can match: there are two slots, chosen by the epoch's parity, and each call writes all words of its slot.
In call e a word of the slot holds e - 2 (or 0, before the first calls) until the word of e replaces it whole, for eight
aligned bytes are never torn; e - 2 and e differ, also where epochs wrap around. And none is replaced too early: see exchange.

Whether all words have come is decided for all threads at once (`absent`): warps that decided each for itself, on loads made
at different moments, would part. The vote is an instruction of NVIDIA's; the space has no LL elsewhere.

What is voted on must be what is used. Of a tile with fewer elements than the program has threads Triton may make two loads, a volatile
one too, if two layouts of it are wanted: threads would vote on one and merge the other, which was loaded at another
moment. So no tile that is polled is as small: log-sum-exps are loaded REPEAT times, and small results with pieces that are masked.
"""

import triton
import triton.language as tl

from autotax.kernels.primitives import ERROR, note_missing


@triton.jit
def pack(values, epoch):
    """float32 or int32 values as words of a call."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (epoch.to(tl.int64) << 32) | bits


@triton.jit
def rounded(o, PAYLOAD: tl.constexpr, TARGET: tl.constexpr):
    """float32 o in the PAYLOAD type, to the nearest."""
    if TARGET == "interpreter" and tl.bfloat16 == PAYLOAD:
        # Its own conversion cuts the low bits off, twice the error of rounding.
        bits = o.to(tl.int32, bitcast=True)
        o = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return o.to(PAYLOAD)


@triton.jit
def pack_rows(o, epoch, PAYLOAD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """The words of o [BLOCK_G, BLOCK_D], which is of the PAYLOAD type: as many columns, or half as many where that has 16 bits."""
    if tl.float32 == PAYLOAD:
        words = pack(o, epoch)
    else:
        low, high = tl.split(tl.reshape(o, [BLOCK_G, BLOCK_D // 2, 2]))
        low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        words = pack(low | high, epoch)
    return words


@triton.jit
def unpack_rows(words, PAYLOAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """float32 [CHUNK, BLOCK_G, BLOCK_D] of the words of as many rows."""
    bits = words.to(tl.int32)
    if tl.float32 == PAYLOAD:
        o = bits.to(tl.float32, bitcast=True)
    else:
        low = bits.to(tl.int16).to(PAYLOAD, bitcast=True).to(tl.float32)
        high = (bits >> 16).to(tl.int16).to(PAYLOAD, bitcast=True).to(tl.float32)
        o = tl.reshape(tl.join(low, high), [CHUNK, BLOCK_G, BLOCK_D])
    return o


@triton.jit
def absent(words, epoch, TARGET: tl.constexpr):
    """1 if some word is not of this call, else 0; the same in every thread."""
    missing = tl.max(((words >> 32).to(tl.int32) != epoch).to(tl.int32))
    if TARGET == "cuda":
        # Where a tile is smaller than the program, warps hold copies of a word that they loaded at different moments.
        missing = tl.inline_asm_elementwise(
            "{.reg .pred a, b; setp.ne.s32 a, $1, 0; bar.red.or.pred b, 0, a; selp.s32 $0, 1, 0, b;}",
            "=r,r", [missing], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return missing


@triton.jit
def poll(
    at, mask, at_lse, mask_lse, epoch, piece, rank, control, limit, FROM_RANKS: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """The words at `at` [CHUNK, BLOCK_G, BLOCK_W] and `at_lse` [CHUNK, BLOCK_G, REPEAT] once all of them are of this call, or after
    `limit` polls; masked ones are 0. Neither tile has fewer words than the program has threads (see above).

    `piece` [CHUNK] only labels the note left on giving up: it is the rank that a word comes from, or with FROM_RANKS False the
    split of the own rank.
    """
    nothing = epoch.to(tl.int64) << 32
    # Volatile, because a compiler would move an ordinary load out of the loop.
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
        first, seen = earliest(words, piece, epoch)
        first_sum, seen_sum = earliest(sums, piece, epoch)
        if first_sum < first:
            seen = seen_sum
        first = tl.minimum(first, first_sum)
        note_missing(control, first if FROM_RANKS else rank, first, epoch, seen)
    return words, sums


@triton.jit
def earliest(words, piece, epoch):
    """The first piece of which a word is not of this call, and what such a word holds; 2147483647 if there is none."""
    found = (words >> 32).to(tl.int32)
    piece = piece[:, None, None]
    first = tl.min(tl.where(found != epoch, piece, 2147483647))
    return first, tl.max(tl.where((found != epoch) & (piece == first), found, -2147483648))


@triton.jit
def store_words(
    o, lse, o_out, lse_out, at, epoch, PAYLOAD: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes GROUP rows of a partial result, o in the PAYLOAD type, to rows `at` (int64 [BLOCK_G]) of o_out [rows, WORDS] and lse_out [rows]."""
    WORDS: tl.constexpr = HEAD_DIM if tl.float32 == PAYLOAD else (HEAD_DIM + 1) // 2
    BLOCK_W: tl.constexpr = BLOCK_D if tl.float32 == PAYLOAD else BLOCK_D // 2
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_W)
    # The base comes from an integer: see `attention.store_rows`.
    there = tl.multiple_of(o_out + at[:, None] * WORDS + w[None, :], (8, 16 if WORDS % 2 == 0 else 8))
    tl.store(there, pack_rows(o, epoch, PAYLOAD, BLOCK_G, BLOCK_D), mask=(g < GROUP)[:, None] & (w < WORDS)[None, :])
    tl.store(lse_out + at, pack(lse, epoch), mask=g < GROUP)


@triton.jit
def merge_words(
    o, lse, first, rows, epoch, rank, control, limit,
    FROM_RANKS: tl.constexpr, PAYLOAD: tl.constexpr, PIECES: tl.constexpr, CHUNK: tl.constexpr, REPEAT: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows first ... first + GROUP of PIECES partial results and merges them, CHUNK (a power of two) at a time.

    `first` is int64, and `rows` the rows between pieces; `limit` is that of the control block. BLOCK_D may be a part of HEAD_DIM,
    `o` then points to its first column. CHUNK and REPEAT: see `inbox.tiles_of`.
    """
    WORDS: tl.constexpr = HEAD_DIM if tl.float32 == PAYLOAD else (HEAD_DIM + 1) // 2
    BLOCK_W: tl.constexpr = BLOCK_D if tl.float32 == PAYLOAD else BLOCK_D // 2
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_W)
    again = tl.zeros([1, 1, REPEAT], tl.int64)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for block in tl.range(0, PIECES, CHUNK, num_stages=1):
        piece = block + tl.arange(0, CHUNK)
        there = (piece < PIECES)[:, None, None] & (g < GROUP)[None, :, None]
        row = first + piece.to(tl.int64)[:, None, None] * rows + g[None, :, None]
        at = o + row * WORDS + w[None, None, :]
        inside = there & (w < WORDS)[None, None, :]
        words, sums = poll(at, inside, lse + (row + again), there, epoch, piece, rank, control, limit, FROM_RANKS, TARGET)
        shares = tl.where(there, sums.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
        shares = tl.max(shares, 2)  # they are the same
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
