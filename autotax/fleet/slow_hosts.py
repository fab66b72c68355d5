"""SLOW HOSTS: two hosts of one kind should take the same time for the same bulk-synchronous call. Who does not is named."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

LIMIT = 0.10


@dataclass(frozen=True)
class Gap:
    """The widest gap between two hosts of a kind, for one problem."""

    kind: str
    problem: str
    slow: str
    fast: str
    slow_us: float
    fast_us: float

    @property
    def ratio(self) -> float:
        return self.slow_us / self.fast_us

    def __str__(self) -> str:
        times = f"{self.slow_us:,.1f} us against {self.fast_us:,.1f} us"
        return f"{self.slow} is {100 * (self.ratio - 1):.0f} % slower than {self.fast} at BSP of {self.problem} ({times})"


def gaps(measured: Iterable[tuple[str, str, str, str, float]], limit: float = LIMIT) -> list[Gap]:
    """The pairs of hosts that differ by more than `limit`, each once, by its widest gap, the widest first. What is measured is
    told as (kind, problem, config, host, microseconds): only the same config of the same problem compares.
    """
    found: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, problem, config, host, us in measured:
        found[kind, problem, config][host].append(us)
    widest: dict[tuple[str, str, str], Gap] = {}
    for (kind, problem, _), hosts in found.items():
        medians = sorted((statistics.median(times), host) for host, times in hosts.items())
        for slow_us, slow in medians:
            fast_us, fast = medians[0]
            gap = Gap(kind, problem, slow, fast, slow_us, fast_us)
            pair = kind, min(slow, fast), max(slow, fast)
            if gap.ratio > 1 + limit and (pair not in widest or gap.ratio > widest[pair].ratio):
                widest[pair] = gap
    return sorted(widest.values(), key=lambda gap: -gap.ratio)
