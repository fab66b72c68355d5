"""The exchange of partial results between ranks: push rows to the inboxes of the ranks that need them, then merge those.

With output `replicated` all rows go to all ranks; with `head_scatter` each row goes to the rank that owns its head, and rows are
ordered by owner (`attention.place`). `arriving` is the number of rows that a rank receives from each rank.

The inbox is o [2, world, arriving, ...] and, with flags, lse [2, world, arriving]. The parity of the epoch selects the slot. With
flags, rows are stored as float32 or the PAYLOAD type, and a flag follows each block of rows. With LL, rows are words that need
neither fence nor flag, because every word carries a tag of its call.

A word is 8 bytes, written by one store. Its low half is one float32 of a partial result, or two neighbouring columns rounded to a
16-bit PAYLOAD type. Its high half is the log-sum-exp of its row, so that a word can be merged without any other. The tag is the
epoch of the call modulo 8. It replaces the last three bits of the float32, or with a 16-bit PAYLOAD those of the log-sum-exp. A
row of head_dim columns is WORDS words, head_dim or half as many, rounded up. The reader reloads its words until each has the tag
of the call. See docs/flash-decode.md for why no word is stale, torn, or replaced before it was read.

All threads decide together whether all words have arrived (`absent`), and the vote and the merge use the same loaded values. If a
tile had fewer elements than the program has threads, and two layouts of it were needed, Triton would duplicate the load, even a
volatile one. So polled tiles are never that small (`shapes.chunk_of`).
"""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.attention import merge, store_partial, store_rows
from autotax.kernels.primitives import ERROR, flag_address, load_whole, note_missing, signal, signal_all, store_whole, wait

TAG = tl.constexpr(7)


@triton.jit
def tag_of(epoch, PAYLOAD: tl.constexpr):
    """A word that holds only the tag of a call."""
    SHIFT: tl.constexpr = 0 if tl.float32 == PAYLOAD else 32
    return (epoch & TAG).to(tl.int64) << SHIFT


@triton.jit
def age(words, epoch, PAYLOAD: tl.constexpr):
    """Number of calls since a word was written, modulo 8: int32."""
    SHIFT: tl.constexpr = 0 if tl.float32 == PAYLOAD else 32
    return (epoch - (words >> SHIFT).to(tl.int32)) & TAG


@triton.jit
def rounded(o, PAYLOAD: tl.constexpr, TARGET: tl.constexpr):
    """Rounds float32 o to the nearest value of the PAYLOAD type."""
    if TARGET == "interpreter" and tl.bfloat16 == PAYLOAD:
        # The interpreter's own conversion truncates, which has twice the error of rounding.
        bits = o.to(tl.int32, bitcast=True)
        o = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return o.to(PAYLOAD)


@triton.jit
def pack_rows(o, lse, epoch, PAYLOAD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """The words of o [BLOCK_G, BLOCK_D] of the PAYLOAD type: one per column, or two of 16 bits. lse has the shape of o."""
    lse = lse.to(tl.int32, bitcast=True)
    if tl.float32 == PAYLOAD:
        data = o.to(tl.int32, bitcast=True) & ~TAG
    else:
        low, high = tl.split(tl.reshape(o, [BLOCK_G, BLOCK_D // 2, 2]))
        data = (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        lse, _ = tl.split(tl.reshape(lse & ~TAG, [BLOCK_G, BLOCK_D // 2, 2]))
    return (lse.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF) | tag_of(epoch, PAYLOAD)


@triton.jit
def lse_of(words, PAYLOAD: tl.constexpr):
    """The log-sum-exp that each word carries."""
    bits = (words >> 32).to(tl.int32)
    return (bits if tl.float32 == PAYLOAD else bits & ~TAG).to(tl.float32, bitcast=True)


@triton.jit
def column_of(words, HIGH: tl.constexpr, PAYLOAD: tl.constexpr):
    """The column that each word holds, as float32. Of two columns it is the second with HIGH, else the first."""
    bits = words.to(tl.int32)
    if tl.float32 == PAYLOAD:
        return (bits & ~TAG).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - decided when compiled
        return (bits >> (16 if HIGH else 0)).to(tl.int16).to(PAYLOAD, bitcast=True).to(tl.float32)


@triton.jit
def absent(words, epoch, PAYLOAD: tl.constexpr, TARGET: tl.constexpr):
    """1 if some word does not have the tag of this call, else 0; the same in every thread."""
    missing = tl.max((age(words, epoch, PAYLOAD) != 0).to(tl.int32))
    if TARGET == "cuda":
        missing = tl.inline_asm_elementwise(
            "{.reg .pred a, b; setp.ne.s32 a, $1, 0; bar.red.or.pred b, 0, a; selp.s32 $0, 1, 0, b;}",
            "=r,r", [missing], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return missing


@triton.jit
def poll(
    at, mask, safe, epoch, piece, rank, control, limit,
    FROM_RANKS: tl.constexpr, PAYLOAD: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The words at `at` [CHUNK, BLOCK_G, BLOCK_W] when all have the tag of this call, or after `limit` polls; zero where masked.

    `piece` [CHUNK] only labels the note of a timeout: the source rank, or with FROM_RANKS False the split on this rank.
    """
    nothing = tag_of(epoch, PAYLOAD)
    words = load_whole(at, mask, safe, nothing, TARGET)
    missing = absent(words, epoch, PAYLOAD, TARGET)
    polls = 0
    while (missing != 0) & (polls < limit):
        words = load_whole(at, mask, safe, nothing, TARGET)
        missing = absent(words, epoch, PAYLOAD, TARGET)
        polls += 1
        if polls % 1024 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                polls = limit
    if missing != 0:
        late = age(words, epoch, PAYLOAD)
        label = piece[:, None, None]
        first = tl.min(tl.where(late != 0, label, 2147483647))
        missing = epoch - tl.max(tl.where(label == first, late, 0))
        note_missing(control, first if FROM_RANKS else rank, first, epoch, missing, TARGET)
    return words


@triton.jit
def store_words(
    o, lse, out, at, epoch, PAYLOAD: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes GROUP rows of a partial result, o in the PAYLOAD type, to rows `at` (int64 [BLOCK_G]) of out [rows, WORDS].

    lse is [BLOCK_G], or [BLOCK_G, BLOCK_D] with equal columns. BLOCK_D may be a part of HEAD_DIM, where `out` then begins.
    """
    WORDS: tl.constexpr = HEAD_DIM if tl.float32 == PAYLOAD else (HEAD_DIM + 1) // 2
    BLOCK_W: tl.constexpr = BLOCK_D if tl.float32 == PAYLOAD else BLOCK_D // 2
    if len(lse.shape) == 1:
        lse = tl.broadcast_to(lse[:, None], [BLOCK_G, BLOCK_D])
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_W)
    # The base pointer comes from an integer: see `attention.store_rows`.
    addresses = tl.multiple_of(out + at[:, None] * WORDS + w[None, :], (8, 16 if WORDS % 2 == 0 else 8))
    store_whole(addresses, pack_rows(o, lse, epoch, PAYLOAD, BLOCK_G, BLOCK_D), (g < GROUP)[:, None] & (w < WORDS)[None, :], TARGET)


@triton.jit
def merge_words(
    words_in, first, rows, epoch, rank, control, limit,
    FROM_RANKS: tl.constexpr, PAYLOAD: tl.constexpr, PIECES: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows first ... first + GROUP of PIECES partial results and merges them, CHUNK (a power of two) at a time.

    `first` is int64, `rows` the number of rows of a piece, and `limit` comes from the control block. BLOCK_D may be a part of
    HEAD_DIM, at whose first word `words_in` begins. Returns o [BLOCK_G, BLOCK_D] and lse with equal columns.
    """
    TWO: tl.constexpr = tl.float32 != PAYLOAD
    WORDS: tl.constexpr = (HEAD_DIM + 1) // 2 if TWO else HEAD_DIM
    BLOCK_W: tl.constexpr = BLOCK_D // 2 if TWO else BLOCK_D
    g = tl.arange(0, BLOCK_G)
    w = tl.arange(0, BLOCK_W)
    top = tl.full([BLOCK_G, BLOCK_W], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    low = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    if TWO:
        high = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    for block in tl.range(0, PIECES, CHUNK, num_stages=1):
        piece = block + tl.arange(0, CHUNK)
        valid = (piece < PIECES)[:, None, None] & (g < GROUP)[None, :, None]
        row = first + piece.to(tl.int64)[:, None, None] * rows + g[None, :, None]
        inside = valid & (w < WORDS)[None, None, :]
        words = poll(
            words_in + row * WORDS + w[None, None, :], inside, words_in, epoch, piece, rank, control, limit, FROM_RANKS, PAYLOAD, TARGET
        )  # fmt: skip
        lse = tl.where(valid, lse_of(words, PAYLOAD), float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - base[None, :, :])
        shrink = tl.exp2(top - base)
        # One reduction sums both: where warps hold different pieces, each reduction costs three barriers.
        first_column = tl.join(weights * column_of(words, False, PAYLOAD), weights)
        if TWO:
            second_column = tl.join(weights * column_of(words, True, PAYLOAD), weights)
            firsts, seconds = tl.split(tl.sum(tl.join(first_column, second_column), 0))
            low_sum, sums = tl.split(firsts)
            high_sum, _ = tl.split(seconds)
            high = high * shrink + high_sum
        else:
            low_sum, sums = tl.split(tl.sum(first_column, 0))
        low = low * shrink + low_sum
        total = total * shrink + sums
        top = new_top
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    o = low / divisor
    if TWO:
        o = tl.reshape(tl.join(o, high / divisor), [BLOCK_G, BLOCK_D])
    return o, tl.where(some, top + tl.log2(divisor), float("-inf"))


@triton.jit
def distances(bases, rank, WORLD: tl.constexpr):
    """Byte distances from this rank's heap to the heap of each rank, from the next rank around to this rank.

    Kernels load them at their start: later, when results are ready to push, the bases have been evicted from the L2.
    """
    own = tl.load(bases + rank)
    away = ()
    for hop in tl.static_range(1, WORLD + 1):
        away += (tl.load(bases + (rank + hop) % WORLD) - own,)  # type: ignore[assignment]
    return away


@triton.jit
def push_result(
    o, lse, first, inbox_o, inbox_lse, flags, bases, away, epoch, rank, arriving,
    WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, SCATTER: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP to all ranks, this rank last, and signals flag (rank, block of rows) of each. With
    SCATTER it writes only to the rank that owns all these rows. `away` are the `distances` of the ranks.
    """
    o = rounded(o, PAYLOAD, TARGET)
    if SCATTER:
        peer = first // arriving
        first = first % arriving
        far = tl.cast(0, tl.int64)
        for hop in tl.static_range(WORLD):
            far += tl.where((rank + 1 + hop) % WORLD == peer, away[hop], 0)
        send(o, lse, first, far, inbox_o, inbox_lse, epoch, rank, arriving, WORLD, LL, PAYLOAD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
        if not LL:
            signal(flag_address(flags, rank * (arriving // GROUP) + first // GROUP, bases, rank, peer), 1, TARGET, "sys")
    else:
        for hop in tl.static_range(WORLD):
            send(o, lse, first, away[hop], inbox_o, inbox_lse, epoch, rank, arriving, WORLD, LL, PAYLOAD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
        if not LL:
            signal_all(flags, rank * (arriving // GROUP) + first // GROUP, bases, rank, WORLD, True, TARGET)


@triton.jit
def send(
    o, lse, first, far, inbox_o, inbox_lse, epoch, rank, arriving, WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP, numbered as they arrive, to the inbox of the rank at distance `far`."""
    slot = (epoch & 1) * WORLD + rank
    there_o = (inbox_o.to(tl.int64) + far).to(inbox_o.dtype)
    at = first + tl.arange(0, BLOCK_G)
    if LL:
        store_words(o, lse, there_o, slot.to(tl.int64) * arriving + at, epoch, PAYLOAD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)
    else:
        there_lse = (inbox_lse.to(tl.int64) + far).to(inbox_lse.dtype)
        there_o += slot.to(tl.int64) * arriving * HEAD_DIM
        store_partial(o, lse, there_o, there_lse + slot * arriving, at, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit
def receive_result(
    out, first, inbox_o, inbox_lse, flags, control, limit, epoch, rank, arriving,
    WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, CHUNK: tl.constexpr, PUSHED: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows first ... first + GROUP of every rank, merges them and writes out [arriving, head_dim].

    PUSHED, a multiple of GROUP, is the number of rows that share a flag. With LL, BLOCK_D may be a part of HEAD_DIM, at whose
    first column `out` and `inbox_o` begin. For CHUNK see `merge_words`.
    """
    slot = (epoch & 1) * WORLD
    if LL:
        o, _ = merge_words(
            inbox_o, slot.to(tl.int64) * arriving + first, arriving, epoch, rank, control, limit,
            True, PAYLOAD, WORLD, CHUNK, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
        )  # fmt: skip
    else:
        for hop in tl.range(0, WORLD, num_stages=1):
            source = (rank + WORLD - hop) % WORLD
            index = source * (arriving // PUSHED) + first // PUSHED
            wait(flags + index, epoch, source, index, control, TARGET)
        o, _ = merge(
            inbox_o + slot.to(tl.int64) * arriving * HEAD_DIM, inbox_lse + slot * arriving, first, arriving * HEAD_DIM, arriving,
            WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
        )  # fmt: skip
    store_rows(o, out, first + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
