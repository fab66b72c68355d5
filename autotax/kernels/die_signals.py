"""Signals to peers that programs of one die combine: they are counted on the die first, then written back and sent
once.

On AMD a release writes back the whole L2 of the die, so several releases at a time repeat the same work. Here a
program counts itself as pending on its die once its stores have reached the L2. The first pending program signals for
all of them. It reads how many are pending, writes back the L2, adds that number to the peer's flag, and subtracts it
from the count. It repeats this until none is pending. Waits have the same goals as with `signal`.

The hardware reports which die a program runs on. So the result is right for any placement of programs. It saves work
only where programs of one die signal the same flag at about the same time (`comm_dies` of `push`).
tests/kernels/test_die_signals.py tries all interleavings of the steps. The code has not run on an AMD GPU.
"""

import triton
import triton.language as tl

from autotax.kernels.primitives import settle, write_back

MOST_DIES = 16
"""Dies that the hardware can number."""


@triton.jit
def die_of_program(DIES: tl.constexpr, TARGET: tl.constexpr):
    """The number of the die that runs this program. On other machines than AMD, the die on which AMD would probably
    place it.
    """
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
