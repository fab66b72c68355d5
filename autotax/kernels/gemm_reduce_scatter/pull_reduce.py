"""pull_reduce: like `push`, but a tile stays in an outbox of the rank that computed it, and its owner reads it from
there.

Stores and releases are then local and fast. Reading across links takes more programs than writing; `adders` provides
them. Waits and the reuse of slots are as in `push`: the flag that releases a tile for reading lies at the owner.
"""

from __future__ import annotations

from autotax.kernels.gemm_reduce_scatter.push import Push


class PullReduce(Push):
    PULL = True
