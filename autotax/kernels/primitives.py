"""Device functions that every variant shares: peer addresses, signals, bounded waits, epochs.

`TARGET` is "cuda", "hip" or "interpreter" and the only thing that machines differ by. The rules behind each line are in
docs/memory-model.md. In short:

- flags are counters that only grow; a call waits until a flag has reached its goal, which the epoch (the number of the
  call) decides, so nothing is reset between calls and a captured graph can be replayed;
- differences, not values, are compared, so that counters may wrap around;
- every wait is bounded and leaves a note of who waited for whom in the control block.
"""

import triton
import triton.language as tl

# Words of the control block: int32 [16], private to one operator on one rank.
EPOCH = tl.constexpr(0)  # number of the call in flight, from 1; the last program to leave advances it
LEFT = tl.constexpr(1)  # programs that have left the call
NEXT_TILE = tl.constexpr(2)  # dynamic tile counter of the call
LIMIT = tl.constexpr(3)  # polls before a wait gives up
ERROR = tl.constexpr(4)  # 1 when some wait gave up; then the four words below tell of the first one
AWAITED = tl.constexpr(9)  # calls whose last product may begin, for operators of several kernels
SLOT_USED = tl.constexpr(10)  # for each of two slots of an inbox, the call that used it last
ALL_BEGUN = tl.constexpr(12)  # the last call that all peers are known to have begun
CONTROL_WORDS = 16


def arithmetic(function):
    """Makes plain integer arithmetic of autotax.spaces.order callable in kernels; the interpreter calls it as it is."""
    return function if triton.knobs.runtime.interpret else triton.jit(function)


@triton.jit
def translate(pointer, bases, rank, peer):
    """The address on `peer` that corresponds to `pointer` on `rank`; heap allocations are 1024-byte aligned."""
    offset = pointer.to(tl.int64) - tl.load(bases + rank)
    return tl.multiple_of(tl.load(bases + peer) + offset, 16).to(pointer.dtype)


@triton.jit
def flag_address(flags, index, bases, rank, peer):
    """The address of flag `index` in the slab of `peer`."""
    offset = flags.to(tl.int64) - tl.load(bases + rank) + 4 * index
    return (tl.load(bases + peer) + offset).to(flags.dtype)


@triton.jit
def settle(TARGET: tl.constexpr):
    """All threads have made the stores that come before; needed before a release, which one elected thread performs."""
    if TARGET == "hip":
        # debug_barrier is a bare s_barrier there: stores must have left the wave first.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\ns_mov_b32 $0, 0", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def signal(flag, amount, TARGET: tl.constexpr):
    """Adds `amount` to a flag of any rank; whoever sees it there also sees all stores this program made before."""
    settle(TARGET)
    tl.atomic_add(flag, amount, sem="release", scope="sys")


@triton.jit
def signal_all(flags, index, bases, rank, WORLD: tl.constexpr, SELF: tl.constexpr, TARGET: tl.constexpr):
    """Adds 1 to flag `index` of every other rank, and of the own one with SELF; see `signal`.

    On CUDA one fence serves all: a release at each signal would wait for the farthest memory once a peer.
    """
    settle(TARGET)
    if TARGET == "cuda":
        tl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for hop in tl.static_range(1, WORLD + SELF):
        flag = flag_address(flags, index, bases, rank, (rank + hop) % WORLD)
        tl.atomic_add(flag, 1, sem="relaxed" if TARGET == "cuda" else "release", scope="sys")


@triton.jit
def wait(flag, goal, source, index, control, TARGET: tl.constexpr):
    """Returns what the flag holds once it has reached `goal`, or after a bounded number of polls.

    `source` (the rank that signals) and `index` only label the note left on giving up. Once a wait has given up, later
    ones of the same call give up soon.
    """
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen - goal < 0:
        limit = tl.load(control + LIMIT)
        polls = 0
        while (seen - goal < 0) & (polls < limit):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls += 1
            if polls % 1024 == 0:
                if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                    polls = limit
        if seen - goal < 0:
            if tl.atomic_cas(control + ERROR, 0, 1) == 0:
                tl.store(control + ERROR + 1, source)
                tl.store(control + ERROR + 2, index)
                tl.store(control + ERROR + 3, goal)
                tl.store(control + ERROR + 4, seen)
    if TARGET == "cuda":
        # TMA reads through the asynchronous proxy, which the acquire above does not order.
        tl.inline_asm_elementwise(
            "fence.proxy.async;\nmov.u32 $0, $1;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1
        )
    return seen


@triton.jit
def leave(control, epoch, programs):
    """Ends a program's part in the call; the last of `programs` to leave prepares the next call. True for that one."""
    tl.debug_barrier()
    last = tl.atomic_add(control + LEFT, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(control + LEFT, 0)
        tl.store(control + NEXT_TILE, 0)
        tl.store(control + EPOCH, epoch + 1)
    return last


@triton.jit
def copy(destination, source, start, end, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """destination[start:end] = source[start:end]; both bounds are multiples of ALIGNED elements."""
    width: tl.constexpr = ALIGNED * (destination.dtype.element_ty.primitive_bitwidth // 8)
    lanes = tl.arange(0, BLOCK)
    end = tl.multiple_of(end, ALIGNED)
    for first in range(start, end, BLOCK):
        at = tl.multiple_of(first, ALIGNED) + lanes
        inside = at < end
        # A translated base comes from an integer; without the hint the stores to it would be two bytes wide.
        there = tl.multiple_of(destination + at, width)
        tl.store(there, tl.load(source + at, mask=inside), mask=inside)


@triton.jit
def copy_block(
    destination, source, row, row_end, col, col_end, stride_there, stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """destination[row:row_end, col:col_end] = source[...], both row-major; columns and strides are multiples of ALIGNED."""
    size: tl.constexpr = destination.dtype.element_ty.primitive_bitwidth // 8
    col_end = tl.multiple_of(col_end, ALIGNED)
    for r in range(row, row_end, ROWS):
        for c in range(col, col_end, COLS):
            rows = (r + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            cols = (tl.multiple_of(c, ALIGNED) + tl.arange(0, COLS))[None, :]
            inside = (rows < row_end) & (cols < col_end)
            there = tl.multiple_of(destination + rows * stride_there + cols, (size, ALIGNED * size))  # see `copy`
            tl.store(there, tl.load(source + rows * stride + cols, mask=inside), mask=inside)


@triton.jit
def dot(x, y, acc, TARGET: tl.constexpr):
    """acc + x @ y in float32, x rounded to y's type. The interpreter holds bf16 as integers and must be given float32."""
    if TARGET == "interpreter":
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x.to(y.dtype), y, acc, input_precision="ieee")


@triton.jit
def note_missing(control, source, index, goal, seen):
    """Leaves the note of a wait that gave up, unless an earlier one has: see `Context.note_of`."""
    if tl.atomic_cas(control + ERROR, 0, 1) == 0:
        tl.store(control + ERROR + 1, source)
        tl.store(control + ERROR + 2, index)
        tl.store(control + ERROR + 3, goal)
        tl.store(control + ERROR + 4, seen)
