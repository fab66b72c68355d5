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
"""

import triton
import triton.language as tl

from autotax.kernels.primitives import ERROR, LIMIT, note_missing


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
def poll(at, mask, epoch, piece, rank, control, FROM_RANKS: tl.constexpr, TARGET: tl.constexpr):
    """The words at `at`, once all of them are of this call, or after a bounded number of polls; masked ones are 0.

    `piece` (of the shape of `at`) only labels the note left on giving up: it is the rank that a word comes from, or with
    FROM_RANKS False the split of the own rank.
    """
    nothing = epoch.to(tl.int64) << 32
    # Volatile, because a compiler would move an ordinary load out of the loop.
    words = tl.load(at, mask=mask, other=nothing, volatile=True)
    missing = absent(words, epoch, TARGET)
    limit = tl.load(control + LIMIT)
    polls = 0
    while (missing != 0) & (polls < limit):
        words = tl.load(at, mask=mask, other=nothing, volatile=True)
        missing = absent(words, epoch, TARGET)
        polls += 1
        if polls % 1024 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                polls = limit
    if missing != 0:
        found = (words >> 32).to(tl.int32)
        first = tl.min(tl.where(found != epoch, piece, 2147483647))
        seen = tl.max(tl.where((found != epoch) & (piece == first), found, -2147483648))
        note_missing(control, first if FROM_RANKS else rank, first, epoch, seen)
    return words


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
    o, lse, first, rows, epoch, rank, control,
    FROM_RANKS: tl.constexpr, PAYLOAD: tl.constexpr, PIECES: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows first ... first + GROUP of PIECES partial results and merges them, CHUNK (a power of two) at a time.

    `first` is int64, and `rows` the rows between pieces. The log-sum-exps are polled first: they are few, so that polling leaves the memory to
    those who still attend, and when they have come the rest has nearly always come too.
    """
    WORDS: tl.constexpr = HEAD_DIM if tl.float32 == PAYLOAD else (HEAD_DIM + 1) // 2
    BLOCK_W: tl.constexpr = BLOCK_D if tl.float32 == PAYLOAD else BLOCK_D // 2
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_W)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for block in tl.range(0, PIECES, CHUNK, num_stages=1):
        piece = block + tl.arange(0, CHUNK)
        there = (piece < PIECES)[:, None] & (g < GROUP)[None, :]
        row = first + piece.to(tl.int64)[:, None] * rows + g[None, :]
        label = piece[:, None] + tl.zeros([CHUNK, BLOCK_G], tl.int32)
        bits = poll(lse + row, there, epoch, label, rank, control, FROM_RANKS, TARGET).to(tl.int32)
        part = tl.where(there, bits.to(tl.float32, bitcast=True), float("-inf"))
        at = o + row[:, :, None] * WORDS + w[None, None, :]
        inside = there[:, :, None] & (w < WORDS)[None, None, :]
        label = piece[:, None, None] + tl.zeros([CHUNK, BLOCK_G, BLOCK_W], tl.int32)
        words = poll(at, inside, epoch, label, rank, control, FROM_RANKS, TARGET)
        new_top = tl.maximum(top, tl.max(part, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(part - base[None, :])
        shrink = tl.exp2(top - base)
        values = unpack_rows(words, PAYLOAD, CHUNK, BLOCK_G, BLOCK_D)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * values, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    some = total > 0.0
    return acc / tl.where(some, total, 1.0)[:, None], tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
