"""Signals to peers that programs of one die make together: counted on the die first, then written back and told once.

On AMD a release writes back the whole L2 of the die, so several at a time do the same work several times. Here a program whose
stores have reached the L2 counts itself as pending on its die. Whoever finds nobody pending tells for all: it reads how many there
are, writes the L2 back, adds that many to the flag of the peer, and takes them off the count, until none is left. The goals of waits
are those of `signal`.

Which die a program runs on the hardware says. So this is right wherever programs are put, though it saves work only where
programs of one die signal the same flag at about the same time (`comm_dies` of `push`). tests/kernels/test_die_signals.py tries
all interleavings of the steps. No AMD GPU has run it.
"""

import triton
import triton.language as tl

from autotax.kernels.primitives import settle, write_back

MOST_DIES = 16
"""That the hardware can number."""


@triton.jit
def die_of_program(DIES: tl.constexpr, TARGET: tl.constexpr):
    """The number of the die that runs this program; elsewhere than on AMD, of the one that AMD would probably take."""
    if TARGET == "hip":
        die = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        die = tl.program_id(0) % DIES
    return die


@triton.jit
def signal_of_die(flag, pending, TARGET: tl.constexpr):
    """As `signal(flag, 1, TARGET, "sys")`. `pending` is a word of this die and flag, zero between calls."""
    settle(TARGET)
    if tl.atomic_add(pending, 1, sem="relaxed", scope="gpu") == 0:
        left = 1
        while left > 0:
            # Read and known before the write-back begins, which then covers all who are counted.
            seen = tl.atomic_add(pending, 0, sem="relaxed", scope="gpu")
            settle(TARGET)
            if TARGET == "hip":
                write_back("sys")
            tl.atomic_add(flag, seen, sem="relaxed" if TARGET == "hip" else "release", scope="sys")
            left = tl.atomic_add(pending, -seen, sem="relaxed", scope="gpu") - seen
