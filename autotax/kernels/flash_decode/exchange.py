"""The exchange of partial results between ranks: push to every inbox with a signal a block of rows, then merge what came.

The inbox is o [2, world, rows, head_dim] and lse [2, world, rows], float32, its slot chosen by the epoch's parity. A rank
writes a slot again two calls later, after it has received the results of the call between, which each peer sent after it
had finished with the slot.
"""

import triton
import triton.language as tl

from autotax.kernels.flash_decode.attention import merge, store_partial, store_rows
from autotax.kernels.primitives import signal_all, translate, wait


@triton.jit
def push_result(
    o, lse, first, inbox_o, inbox_lse, flags, bases, epoch, rank, rows,
    WORLD: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP to all ranks, the own one last, and signals flag (rank, block of rows) of each."""
    blocks = rows // GROUP
    slot = (epoch & 1) * WORLD + rank
    for hop in tl.static_range(1, WORLD + 1):
        peer = (rank + hop) % WORLD
        there_o = translate(inbox_o, bases, rank, peer) + slot.to(tl.int64) * rows * HEAD_DIM
        there_lse = translate(inbox_lse, bases, rank, peer) + slot * rows
        store_partial(o, lse, there_o, there_lse, first, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    signal_all(flags, rank * blocks + first // GROUP, bases, rank, WORLD, True, TARGET)


@triton.jit
def receive_result(
    out, first, inbox_o, inbox_lse, flags, control, epoch, rank, rows,
    WORLD: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows first ... first + GROUP of every rank, merges them and writes out [rows, head_dim]."""
    blocks = rows // GROUP
    for hop in tl.range(0, WORLD, num_stages=1):
        source = (rank + WORLD - hop) % WORLD
        index = source * blocks + first // GROUP
        wait(flags + index, epoch, source, index, control, TARGET)
    slot = (epoch & 1) * WORLD
    o, _ = merge(
        inbox_o + slot.to(tl.int64) * rows * HEAD_DIM, inbox_lse + slot * rows, first, rows * HEAD_DIM, rows,
        WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    store_rows(o, out, first, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
