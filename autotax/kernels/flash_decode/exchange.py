"""The exchange of partial results between ranks: push rows to the inboxes of the ranks that need them, then merge the received
rows.

With output `replicated` all rows go to all ranks; with `head_scatter` each row goes to the rank that owns its head, and rows are
ordered by owner (`attention.place`). `arriving` is the number of rows that a rank receives from each rank.

The inbox is o [2, world, arriving, ...] and, with flags, lse [2, world, arriving]. The parity of the epoch selects one of its two
slots. A rank overwrites a slot two calls later. By then it has received the results of the call in between, and each peer sent
those after it had finished reading the slot.

With flags, rows are stored as float32 or the PAYLOAD type, and a flag follows each block of rows. With LL, rows are words that
carry the epoch (see `ll_packets`), and no flags are used.
"""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.attention import merge, store_partial, store_rows
from autotax.kernels.flash_decode.ll_packets import merge_words, rounded, store_words
from autotax.kernels.primitives import flag_address, signal, signal_all, wait


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
    """Writes rows first ... first + GROUP to the inbox of the rank at distance `far`; row numbers count the rows that arrive
    there.
    """
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

    PUSHED, a multiple of GROUP, is the number of rows that share a flag. With LL, BLOCK_D may be a part of HEAD_DIM; then `out`
    and `inbox_o` point to the first column of that part. For CHUNK see `merge_words`.
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
