"""Atomic stores and polling loads of 8-byte words that validate themselves, on any machine.

On NVIDIA and on CPU ranks they are Triton's own stores and volatile loads. On AMD both are instructions of system
scope (`sc0 sc1`). A store goes through the caches of its die to where peers and other dies find it. A load bypasses
the caches of its die. Triton's `volatile` does not do that on AMD: Triton 3.7.1 makes it a plain buffer load. `.wt`
waits for each store. No instruction is wider than a word, so no word can be torn.

On AMD a vote on words is a reduction. All waves get the same result if no two of them hold copies of one word. So a
polled tile has at least as many words as the program has threads. The loads are marked as having side effects, so
that the compiler cannot repeat them for another layout. tests/kernels/test_words_on_amd.py checks all this in the
assembly. The code has not run on an AMD GPU.
"""

import triton
import triton.language as tl
from triton.language.core import builtin, constexpr

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
def store_whole(there, words, mask, TARGET: tl.constexpr):
    """Stores int64 words, each with one instruction. A later kernel or a polling reader sees them."""
    if TARGET == "hip":
        tl.inline_asm_elementwise(
            "v_cmp_ne_u32 vcc, 0, $4\ns_and_saveexec_b64 $1, vcc\nglobal_store_dwordx2 $2, $3, off sc0 sc1\n"
            "s_mov_b64 exec, $1\ns_mov_b32 $0, 0",
            "=&s,=&s,v,v,v,~{vcc},~{scc},~{memory}",
            [there.to(tl.int64), words, tl.broadcast_to(mask, words.shape).to(tl.int32)],
            dtype=(tl.int32, tl.int64), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(there, words, mask=mask)


@triton.jit
def load_whole(at, mask, safe, other, TARGET: tl.constexpr):
    """Returns the current values of int64 words, for polling; `other` where masked. `safe` is a readable address that
    is loaded in place of masked words.
    """
    if TARGET == "hip":
        inside = tl.broadcast_to(mask, at.shape)
        TOGETHER: tl.constexpr = at_once(at.numel, threads_of_program())
        there = tl.where(inside, at.to(tl.int64), safe.to(tl.int64))
        found = tl.inline_asm_elementwise(
            _load(TOGETHER), _loaded(TOGETHER), [there], dtype=tl.int64, is_pure=False, pack=TOGETHER
        )
        return tl.where(inside, found, other)
    else:  # noqa: RET505 - decided at compile time
        # Volatile, because the compiler would move an ordinary load out of the loop.
        return tl.load(at, mask=mask, other=other, volatile=True)
