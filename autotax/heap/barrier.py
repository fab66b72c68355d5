"""A barrier with a timeout on every rank. Its error names the missing ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 10e-3
"""Pauses between two polls of the store. The wait of a file store itself takes at least 10 ms."""
LOOKS = 8
"""Polls before the first pause. Ranks that measure arrive almost together, and a pause takes 50 us longer than requested."""


class RankTimeout(RuntimeError):
    """Some rank did not come to a barrier in time; the message names the missing ranks."""


class Barrier:
    """Each rank leaves a key in the store and waits for the others'.

    torch's monitored barrier bounds only the wait of rank 0: if rank 0 is missing, the others hang until the group times out. A
    rank that comes after the others gave up passes the barrier, so the counters of all ranks stay in step.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        # The clone has a separate connection, so a long wait does not block other users of the store.
        self._store = dist.PrefixStore("autotax/barrier", store.clone())  # type: ignore[attr-defined]
        self._rank = rank
        self._size = size
        self._turn = 0

    def wait(self, timeout: timedelta) -> None:
        keys = [f"{self._turn}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "here")
        former = f"{self._turn - 1}/{self._rank}"
        self._turn += 1
        deadline, pause_s, looks = time.monotonic() + timeout.total_seconds(), SHORTEST_PAUSE_S, 0
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not missing:
                    break
                waited = f"rank {self._rank} waited {timeout.total_seconds():g} s at a barrier"
                raise RankTimeout(f"{waited} for rank {', '.join(map(str, missing))}")
            looks += 1
            if looks < LOOKS:
                time.sleep(0)  # lets a rank on the same core run
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        # All ranks have arrived here, so all have left the previous barrier.
        self._store.delete_key(former)
