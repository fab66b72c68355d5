"""Device functions that every variant shares: peer addresses, signals, bounded waits, epochs.

`TARGET` is "cuda", "hip" or "interpreter"; the functions differ by nothing else. See docs/memory-model.md for the rules. In short:

- A flag is a counter that only grows. A call waits until a flag has reached a goal. The goal follows from the epoch,
  the number of the call. So nothing is reset between calls and a captured graph can be replayed.
- Comparisons use differences, not values, so that counters may wrap around.
- Every wait is bounded. When it gives up, it writes a note in the control block: which rank waited for which flag.
"""

import triton
import triton.language as tl
from triton.language.core import builtin, constexpr

# Words of the control block: int32 [16], private to one operator on one rank.
EPOCH = tl.constexpr(0)  # number of the call in flight, from 1; the last program to leave advances it
LEFT = tl.constexpr(1)  # programs that have left the call
NEXT_TILE = tl.constexpr(2)  # dynamic tile counter of the call
LIMIT = tl.constexpr(3)  # polls before a wait gives up
ERROR = tl.constexpr(4)  # 1 when a wait gave up; the next four words then describe the first such wait
AWAITED = tl.constexpr(9)  # operators of several kernels: number of calls whose last product may begin
SLOT_USED = tl.constexpr(10)  # two words, one per slot of an inbox: the call that used the slot last
ALL_BEGUN = tl.constexpr(12)  # the last call that all peers are known to have begun
CONTROL_WORDS = 16


def arithmetic(function):
    """Makes plain integer arithmetic of `kernels.tiling` callable in kernels. The interpreter calls the function as it is."""
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
    """Waits until all threads have made their earlier stores. Needed before a release, which one elected thread performs."""
    if TARGET == "hip":
        # On AMD debug_barrier is a bare s_barrier, so each wave first waits for its stores.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\ns_mov_b32 $0, 0", "=s,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def by_one_wave(INSTRUCTION: tl.constexpr):
    """On AMD: the wave whose first thread performs scalar atomics executes a cache instruction and waits for it."""
    thread = tl.arange(0, 1024)  # 1024 is the most a program can have, so exactly one wave holds thread 0
    tl.inline_asm_elementwise(
        "v_cmp_eq_u32 vcc, 0, $1\ns_cbranch_vccz .Ldone${:uid}\n" + INSTRUCTION + "\ns_waitcnt vmcnt(0)\n"
        ".Ldone${:uid}:\nv_mov_b32 $0, 0",
        "=v,v,~{vcc},~{memory}", [thread], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def write_back(SCOPE: tl.constexpr):
    """On AMD, after `settle`: writes back all stores of the program for any reader in SCOPE ("gpu" or "sys").

    Relaxed atomics may then publish the data. LLVM's own releases are not enough before LLVM change 178316, thus in Triton 3.6
    and 3.7. They start the write-back of the L2 but do not wait for it, so a flag could overtake its data. A single wave does the
    write-back, because each one scans the whole L2 of a die.
    """
    if SCOPE == "sys":
        by_one_wave("buffer_wbl2 sc0 sc1")
    else:
        by_one_wave("buffer_wbl2 sc1")


@triton.jit
def count(word, TARGET: tl.constexpr, SCOPE: tl.constexpr):
    """Adds 1 to a word on this GPU and returns its value before. A program that counts later sees all earlier stores of this one.

    Use SCOPE "sys" if the last program to count publishes the stores to peers: on AMD each die then writes back its own L2.
    """
    settle(TARGET)
    if TARGET == "hip":
        write_back(SCOPE)
        before = tl.atomic_add(word, 1, sem="acquire", scope="gpu")
    else:
        before = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    return before


@triton.jit
def signal(flag, amount, TARGET: tl.constexpr, SCOPE: tl.constexpr):
    """Adds `amount` to a flag of any rank, or with SCOPE "gpu" of this one. Its reader also sees all earlier stores."""
    settle(TARGET)
    if TARGET == "hip":
        write_back(SCOPE)
        tl.atomic_add(flag, amount, sem="relaxed", scope=SCOPE)
    else:
        tl.atomic_add(flag, amount, sem="release", scope=SCOPE)


@triton.jit
def signal_all(flags, index, bases, rank, WORLD: tl.constexpr, SELF: tl.constexpr, TARGET: tl.constexpr):
    """Adds 1 to flag `index` of every other rank, and with SELF also of this rank; see `signal`.

    One fence or write-back serves all signals. A release per signal would wait for the farthest memory once per peer.
    """
    settle(TARGET)
    if TARGET == "cuda":
        tl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    if TARGET == "hip":
        write_back("sys")
    for hop in tl.static_range(1, WORLD + SELF):
        flag = flag_address(flags, index, bases, rank, (rank + hop) % WORLD)
        tl.atomic_add(flag, 1, sem="release" if TARGET == "interpreter" else "relaxed", scope="sys")


@triton.jit
def note_missing(control, source, index, goal, seen, TARGET: tl.constexpr):
    """Records a wait that gave up, unless an earlier one is recorded already; see `context.note_of`."""
    if TARGET == "hip":
        # Any wave may run this, on its first lane. Waves give up independently, so there must be no barrier here.
        tl.inline_asm_elementwise(
            "s_mov_b64 $1, exec\ns_mov_b64 exec, 1\nv_mov_b32 $2, 1\nglobal_atomic_swap $2, $3, $2, off sc0\ns_waitcnt vmcnt(0)\n"
            "v_cmp_eq_u32 vcc, 0, $2\ns_and_b64 exec, exec, vcc\n"
            "global_store_dword $3, $4, off offset:4\nglobal_store_dword $3, $5, off offset:8\n"
            "global_store_dword $3, $6, off offset:12\nglobal_store_dword $3, $7, off offset:16\n"
            "s_mov_b64 exec, $1\ns_mov_b32 $0, 0",
            "=s,=&s,=&v,v,v,v,v,v,~{vcc},~{scc},~{memory}",
            [(control + ERROR).to(tl.int64), tl.cast(source, tl.int32), tl.cast(index, tl.int32), goal, seen],
            dtype=(tl.int32, tl.int64, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        if tl.atomic_cas(control + ERROR, 0, 1) == 0:
            tl.store(control + ERROR + 1, source)
            tl.store(control + ERROR + 2, index)
            tl.store(control + ERROR + 3, goal)
            tl.store(control + ERROR + 4, seen)


@triton.jit
def poll(flag):
    """On AMD: reads the current value of a word of any scope, once per wave. It orders no other memory access."""
    seen, _ = tl.inline_asm_elementwise(
        "global_load_dword $1, $2, off sc0 sc1\ns_waitcnt vmcnt(0)\nv_readfirstlane_b32 $0, $1",
        "=s,=&v,v,~{memory}", [flag.to(tl.int64)], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return seen


@triton.jit
def wait_on_hip(flag, goal, source, index, control):
    """`wait` for AMD: each wave polls for itself, and acquires once the flag has arrived, because that empties the caches.

    A scalar atomic would pass its result to the other waves through shared memory, which the pipeline may fill completely.
    """
    seen = poll(flag)
    if seen - goal < 0:
        limit = tl.load(control + LIMIT)
        polls = 0
        while (seen - goal < 0) & (polls < limit):
            seen = poll(flag)
            polls += 1
            if polls % 1024 == 0:
                if poll(control + ERROR) != 0:
                    polls = limit
        if seen - goal < 0:
            note_missing(control, source, index, goal, seen, "hip")
    by_one_wave("buffer_inv sc0 sc1")
    tl.debug_barrier()
    return seen


@triton.jit
def wait_by_atomics(flag, goal, source, index, control, TARGET: tl.constexpr):
    """`wait` for NVIDIA and the interpreter: one thread polls and passes the value to the others."""
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
            note_missing(control, source, index, goal, seen, TARGET)
    if TARGET == "cuda":
        # TMA reads through the asynchronous proxy. The acquire above does not order that proxy.
        tl.inline_asm_elementwise("fence.proxy.async;\nmov.u32 $0, $1;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1)
    return seen


@triton.jit
def wait(flag, goal, source, index, control, TARGET: tl.constexpr):
    """Waits until the flag has reached `goal`, or for a bounded number of polls. Returns the flag's last value.

    `source` (the rank that signals) and `index` only label the note of a wait that gives up. Later waits give up soon.
    """
    if TARGET == "hip":
        seen = wait_on_hip(flag, goal, source, index, control)
    else:
        seen = wait_by_atomics(flag, goal, source, index, control, TARGET)
    return seen


@triton.jit
def leave(control, epoch, programs, TARGET: tl.constexpr):
    """Ends a program's part in the call. The last of `programs` to leave prepares the next call and returns True."""
    last = count(control + LEFT, TARGET, "gpu") == programs - 1
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
        # A translated base comes from an integer. Without the alignment hint its stores would be two bytes wide.
        addresses = tl.multiple_of(destination + at, width)
        tl.store(addresses, tl.load(source + at, mask=inside), mask=inside)


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
            addresses = tl.multiple_of(destination + rows * stride_there + cols, (size, ALIGNED * size))  # see `copy`
            tl.store(addresses, tl.load(source + rows * stride + cols, mask=inside), mask=inside)


@triton.jit
def dot(x, y, acc, TARGET: tl.constexpr):
    """acc + x @ y in float32, with x rounded to y's type. The interpreter holds bf16 as integers, so it gets float32 operands."""
    if TARGET == "interpreter":
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x.to(y.dtype), y, acc, input_precision="ieee")


# Signals that programs of one die combine. On AMD a release writes back the whole L2 of the die, so several releases at a time
# repeat the same work. Here the first pending program signals for all. The hardware reports which die a program runs on, so the
# result is right for any placement. It saves work only where programs of one die signal the same flag at about the same time
# (`comm_dies` of `push`). The code has not run on an AMD GPU.

MOST_DIES = 16
"""Dies that the hardware can number."""


@triton.jit
def die_of_program(DIES: tl.constexpr, TARGET: tl.constexpr):
    """The die that runs this program. On other machines than AMD, the die on which AMD would probably place it."""
    if TARGET == "hip":
        die = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        die = tl.program_id(0) % DIES
    return die


@triton.jit
def signal_of_die(flag, pending, TARGET: tl.constexpr):
    """Like `signal(flag, 1, TARGET, "sys")`. `pending` is a word of this die and flag; it is zero between calls."""
    settle(TARGET)
    if tl.atomic_add(pending, 1, sem="relaxed", scope="gpu") == 0:
        left = 1
        while left > 0:
            # The count must be known before the write-back begins: the write-back then covers every counted program.
            seen = tl.atomic_add(pending, 0, sem="relaxed", scope="gpu")
            settle(TARGET)
            if TARGET == "hip":
                write_back("sys")
            tl.atomic_add(flag, seen, sem="relaxed" if TARGET == "hip" else "release", scope="sys")
            left = tl.atomic_add(pending, -seen, sem="relaxed", scope="gpu") - seen


# Atomic stores and polling loads of 8-byte words that validate themselves. On NVIDIA and on CPU ranks they are Triton's own stores
# and volatile loads. On AMD both are instructions of system scope: docs/memory-model.md. `.wt` would wait for each store there.

LANES = tl.constexpr(64)
"""Threads of a wave on AMD."""
MOST_AT_ONCE = 8
"""Words that a thread loads before it waits for the first one. Each takes four registers."""


@triton.constexpr_function
def _load(words):
    lines = [f"global_load_dwordx2 ${at}, ${words + at}, off sc0 sc1" for at in range(words)]
    return "\n".join([*lines, "s_waitcnt vmcnt(0)"])


@triton.constexpr_function
def _loaded(words):
    return ",".join(["=&v"] * words + ["v"] * words + ["~{memory}"])


@triton.constexpr_function
def at_once(words, threads):
    """How many words a thread loads together, for a tile of `words` words. All numbers are powers of two."""
    return max(1, min(MOST_AT_ONCE, words // threads))


@builtin
def threads_of_program(_semantic=None):
    """Threads of a program on AMD, for use inside kernels."""
    return constexpr(LANES.value * _semantic.builder.options.num_warps)


@triton.jit
def store_whole(addresses, words, mask, TARGET: tl.constexpr):
    """Stores int64 words, each with one instruction. A later kernel or a polling reader sees them."""
    if TARGET == "hip":
        tl.inline_asm_elementwise(
            "v_cmp_ne_u32 vcc, 0, $4\ns_and_saveexec_b64 $1, vcc\nglobal_store_dwordx2 $2, $3, off sc0 sc1\n"
            "s_mov_b64 exec, $1\ns_mov_b32 $0, 0",
            "=&s,=&s,v,v,v,~{vcc},~{scc},~{memory}",
            [addresses.to(tl.int64), words, tl.broadcast_to(mask, words.shape).to(tl.int32)],
            dtype=(tl.int32, tl.int64), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(addresses, words, mask=mask)


@triton.jit
def load_whole(at, mask, safe, other, TARGET: tl.constexpr):
    """The current values of int64 words, for polling; `other` where masked: the readable address `safe` is loaded there."""
    if TARGET == "hip":
        inside = tl.broadcast_to(mask, at.shape)
        TOGETHER: tl.constexpr = at_once(at.numel, threads_of_program())
        addresses = tl.where(inside, at.to(tl.int64), safe.to(tl.int64))
        words = tl.inline_asm_elementwise(
            _load(TOGETHER), _loaded(TOGETHER), [addresses], dtype=tl.int64, is_pure=False, pack=TOGETHER
        )
        return tl.where(inside, words, other)
    else:  # noqa: RET505 - decided at compile time
        # Volatile, because the compiler would move an ordinary load out of the loop.
        return tl.load(at, mask=mask, other=other, volatile=True)
