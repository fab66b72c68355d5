"""The bulk push that `gather` and `fine_grained` share: the whole partial result of a rank, or with output `head_scatter` the rows
of its destination, goes to every rank, own one included.

The inbox is that of `exchange`, with one flag for each source, which all programs that send to a rank signal.
"""

import triton
import triton.language as tl

from autotax.kernels.primitives import EPOCH, copy, flag_address, signal, translate, wait


@triton.jit(do_not_specialize=["rank"])
def push_kernel(
    o, lse, inbox_o, inbox_lse, flags, bases, control, rank, arriving,
    WORLD: tl.constexpr, SENDERS: tl.constexpr, SCATTER: tl.constexpr, WAIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """SENDERS programs for each destination, each with its share of o [arriving, head_dim] and lse [arriving]; with SCATTER those of
    all destinations stand one behind the other.

    With WAIT the last of them also waits for one source, after it has sent: the launch ends when all have arrived.
    """
    epoch = tl.load(control + EPOCH)
    hop = tl.program_id(0) // SENDERS + 1
    part = tl.program_id(0) % SENDERS
    peer = (rank + hop) % WORLD
    if SCATTER:
        o += peer.to(tl.int64) * arriving * HEAD_DIM
        lse += peer * arriving
    per = tl.cdiv(arriving, SENDERS)
    start = tl.minimum(part * per, arriving)
    end = tl.minimum(start + per, arriving)
    slot = (epoch & 1) * WORLD + rank
    there_o = translate(inbox_o, bases, rank, peer) + slot.to(tl.int64) * arriving * HEAD_DIM
    copy(there_o, o, start * HEAD_DIM, end * HEAD_DIM, BLOCK, ALIGNED)
    copy(translate(inbox_lse, bases, rank, peer) + slot * arriving, lse, start, end, BLOCK, 1)
    signal(flag_address(flags, rank, bases, rank, peer), 1, TARGET, "sys")
    if WAIT:
        if part == SENDERS - 1:
            source = (rank + WORLD - hop) % WORLD
            wait(flags + source, epoch * SENDERS, source, source, control, TARGET)
