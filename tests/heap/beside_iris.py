"""A kernel of Iris's device functions and ours. Imported where Iris is: see test_real_iris.py."""

from __future__ import annotations

import iris
import torch
import triton
import triton.language as tl

from autotax.kernels.offline import pretend
from autotax.kernels.primitives import flag_address, signal, wait


@triton.jit
def exchange_kernel(inbox, flags, bases, control, out, rank, peer, TARGET: tl.constexpr):
    """Iris stores to the peer, we signal and wait, Iris loads from the peer and adds to a word of it."""
    lanes = tl.arange(0, 256)
    iris.store(inbox + lanes, lanes, rank, peer, bases)
    signal(flag_address(flags, 0, bases, rank, peer), 1, TARGET, "sys")
    wait(flags, 1, peer, 0, control, TARGET)
    tl.store(out + lanes, tl.load(inbox + lanes) + iris.load(inbox + lanes, rank, peer, bases))
    iris.atomic_add(out, 1, rank, peer, bases, sem="relaxed", scope="gpu")


def assembly(target: str) -> str:
    """Of that kernel."""
    words = [torch.empty(1024, dtype=torch.int32, device="meta") for _ in range(4)]
    bases = torch.empty(2, dtype=torch.int64, device="meta")
    with pretend(target):
        compiled = exchange_kernel.warmup(
            words[0], words[1], bases, words[2], words[3], 0, 1, TARGET="hip", grid=(1,), num_warps=4
        )
    return str(compiled.asm["amdgcn"])
