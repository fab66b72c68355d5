"""pull_reduce: as `push`, but tiles stay in an outbox of the rank that computed them, and their owner reads them from there.

Stores and releases are then local and quick; reading across links takes more programs than writing, which `adders` gives. Who
waits for whom, and when a slot is written again, is as in `push`: the flag that says that a tile can be read is the owner's.
"""

from __future__ import annotations

from autotax.kernels.gemm_reduce_scatter.push import Push


class PullReduce(Push):
    PULL = True
