"""Data in words of eight bytes. A word itself shows whether it has arrived, so neither fences nor flags are needed.

There are two kinds of words:

- `epoch`: four bytes of data in the low half, the number of the call in the high half. Two slots, selected by the parity of the
  call.
- `blank`: eight bytes of data. A word that has not arrived is BLANK, whose elements are NaNs. Data with the bits of BLANK are
  sent as another NaN. Three slots take turns: each call resets to BLANK the words that the previous call has read.

One store writes a whole word and one load reads it. The reader reloads it until it has arrived.

On AMD the compiler repeats a load where the vote and the sum have different layouts, in spite of its side effects. The load for
the sum could then come before that for the vote. So the words are loaded once more after the vote; none changes back.
"""

import triton
import triton.language as tl

from autotax.kernels.context import gdc_wait
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.gemm_reduce_scatter.words import anywhere
from autotax.kernels.primitives import ERROR, LIMIT, load_whole, note_missing, store_whole

BLANK = tl.constexpr(-1)
INSTEAD = tl.constexpr(-2)
"""INSTEAD replaces data that equal BLANK. All elements of both are NaNs in every type."""


@triton.jit
def open_call(state, control, EARLY: tl.constexpr):
    """Returns what a program reads first: its number and that of programs, the number of the call, the rows of the previous call,
    and the limit of polls.

    With EARLY it first waits for the kernel before this one. `state` is int32 [2, programs]: the number of the call, and the rows
    of the previous call.
    """
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(state + program)
    before = tl.load(state + programs + program)
    limit = tl.load(control + LIMIT)
    return program, programs, epoch, before, limit


@triton.jit
def close_call(state, program, programs, epoch, m):
    """Writes the state for the next call, after a call of m rows."""
    tl.debug_barrier()  # all threads have read the state
    tl.store(state + program, epoch + 1)
    tl.store(state + programs + program, m)


@triton.jit
def packed(data, epoch):
    """Packs data into words: int32 data into words with the number of the call, int64 data into words that are not BLANK."""
    if data.dtype == tl.int32:
        return (epoch.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
    else:  # noqa: RET505 - decided when compiled
        return tl.where(data == BLANK, INSTEAD, data)


@triton.jit
def packed_numbers(values, epoch, WIDE: tl.constexpr, TYPE: tl.constexpr, TARGET: tl.constexpr):
    """Packs float32 values, rounded to TYPE, into words."""
    if TYPE == tl.float32:  # noqa: SIM300
        bits = values.to(tl.int32, bitcast=True)
    else:
        short = rounded(values, TYPE, TARGET).to(tl.int16, bitcast=True)
        low, high = tl.split(tl.reshape(short, [short.shape[0] // 2, 2]))
        bits = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    if WIDE:
        low, high = tl.split(tl.reshape(bits, [bits.shape[0] // 2, 2]))
        bits = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    return packed(bits, epoch)


@triton.jit
def slot_of(epoch, WIDE: tl.constexpr):
    """The slot of a call, one of two or with WIDE of three. Epochs start at 1; a wrapped epoch is treated as unsigned."""
    SLOTS: tl.constexpr = 3 if WIDE else 2
    return (epoch.to(tl.uint32, bitcast=True) % SLOTS).to(tl.int64)


@triton.jit
def numbers(words, WIDE: tl.constexpr, TYPE: tl.constexpr):
    """Unpacks the elements of words, in order, as float32; WIDE words hold eight bytes of data."""
    bits = words.to(tl.int32)
    if WIDE:
        bits = tl.reshape(tl.join(bits, (words >> 32).to(tl.int32)), [2 * words.shape[0]])
    if tl.float32 == TYPE:
        return bits.to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - decided when compiled
        low = bits.to(tl.int16).to(TYPE, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(TYPE, bitcast=True)
        return tl.reshape(tl.join(low, high), [2 * bits.shape[0]]).to(tl.float32)


@triton.jit
def absent(words, epoch, WIDE: tl.constexpr):
    """1 where a word has not arrived."""
    if WIDE:
        return (words == BLANK).to(tl.int32)
    else:  # noqa: RET505 - decided when compiled
        return ((words >> 32).to(tl.int32) != epoch).to(tl.int32)


@triton.jit
def clean(addresses, inside, TARGET: tl.constexpr):
    """Resets words to BLANK."""
    store_whole(addresses, tl.full(addresses.shape, BLANK, tl.int64), inside, TARGET)


@triton.jit
def look(
    own, addresses, stride, inside, safe, epoch, rank,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds up this rank's numbers and the peers', `stride` words apart, in rank order. Returns where words miss, and sums."""
    missing = tl.zeros(addresses.shape, tl.int32)
    total = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(WORLD):
        words = load_whole(addresses + source * stride, inside & (source != rank), safe, 0, TARGET)
        missing += tl.where(inside & (source != rank), absent(words, epoch, WIDE), 0)
        part = tl.where(source == rank, own, numbers(words, WIDE, TYPE))
        if source == 0:
            total = part
        else:
            total += part
    return missing, total


@triton.jit
def await_sum(
    own, addresses, stride, inside, safe, epoch, rank, control, limit,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Repeats `look` until all words have arrived, `limit` times at most, and returns the sums. Leaves notes of late peers."""
    missing, total = look(own, addresses, stride, inside, safe, epoch, rank, WORLD, WIDE, TYPE, TARGET)
    late = anywhere(missing, TARGET)
    looks = 0
    while (late != 0) & (looks < limit):
        missing, total = look(own, addresses, stride, inside, safe, epoch, rank, WORLD, WIDE, TYPE, TARGET)
        late = anywhere(missing, TARGET)
        looks += 1
        if looks % 64 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                looks = limit
    if late != 0:
        for source in tl.range(0, WORLD):
            of_peer = inside & (source != rank)
            words = load_whole(addresses + source * stride, of_peer, safe, 0, TARGET)
            if tl.max(tl.where(of_peer, absent(words, epoch, WIDE), 0)) != 0:
                note_missing(control, source, source, epoch, epoch - 1, TARGET)
    if TARGET == "hip":
        _, total = look(own, addresses, stride, inside, safe, epoch, rank, WORLD, WIDE, TYPE, TARGET)
    return total


@triton.jit
def await_row(addresses, inside, safe, epoch, control, limit, OWN: tl.constexpr, WIDE: tl.constexpr, TARGET: tl.constexpr):
    """Returns the words of a row when all have arrived, or after `limit` attempts. Each rank sends OWN of them, in rank order."""
    words = load_whole(addresses, inside, safe, 0, TARGET)
    missing = tl.where(inside, absent(words, epoch, WIDE), 0)
    late = anywhere(missing, TARGET)
    looks = 0
    while (late != 0) & (looks < limit):
        words = load_whole(addresses, inside, safe, 0, TARGET)
        missing = tl.where(inside, absent(words, epoch, WIDE), 0)
        late = anywhere(missing, TARGET)
        looks += 1
        if looks % 64 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                looks = limit
    if late != 0:
        word = tl.arange(0, addresses.shape[0])
        source = tl.min(tl.where(missing != 0, word, addresses.shape[0])) // OWN
        note_missing(control, source, source, epoch, epoch - 1, TARGET)
    if TARGET == "hip":
        words = load_whole(addresses, inside, safe, 0, TARGET)
    return words
