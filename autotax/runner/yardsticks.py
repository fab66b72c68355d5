"""Readings of the ranks' yardsticks, and their comparison. They need no torch, which takes seconds to import."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SLOW_RANK = {"gpu": 1.15, "cpu": 2.0}
"""A rank that takes this many times as long as the others gives a notice. CPU ranks share cores and are noisy."""
SLOW_ALL = {"gpu": 1.10, "cpu": 2.0}
"""Ranks that all take this many times their best time give a notice too."""


@dataclass(frozen=True)
class Reading:
    """The measurement of one rank's yardstick."""

    us: float
    """Microseconds of the whole work."""
    copy_gbps: float
    """GB/s of its copy, read and written bytes together: the memory bandwidth that a plain kernel gets."""

    def best(self, other: Reading) -> Reading:
        return Reading(min(self.us, other.us), max(self.copy_gbps, other.copy_gbps))


class Watch:
    """Compares the ranks' yardsticks with each other, and with the best of each rank so far."""

    def __init__(self, on_gpu: bool) -> None:
        self._kind = "gpu" if on_gpu else "cpu"
        self._best: list[float] = []

    def note(self, figures: Sequence[float]) -> tuple[str, ...]:
        """Notices for the user about the yardsticks of a job, which are given in rank order."""
        self._best = [min(pair) for pair in zip(figures, self._best or figures, strict=True)]
        notices = []
        for rank, us in enumerate(figures):
            others = [*figures[:rank], *figures[rank + 1 :]]
            if others and us > SLOW_RANK[self._kind] * statistics.median(others):
                slower = us / statistics.median(others) - 1
                notices.append(
                    f"rank {rank} is {slower:.0%} slower than the others at fixed work: "
                    "its clocks are lower or something else runs on its device"
                )
        slowdown = min(us / best for us, best in zip(figures, self._best, strict=True))
        if slowdown > SLOW_ALL[self._kind]:
            notices.append(
                f"all ranks are {slowdown - 1:.0%} slower than at their best: clocks are throttled, or the machine is shared"
            )
        return tuple(notices)
