"""DEALING OUT the problems of a kind of hardware: which are due, and in which order. Pure but for what it is given.

What is tuned is left out. What was tuned, and is stale by now, comes first: programs fall back to bulk-synchronous there since
an upgrade. Of either the longest come first, so that no host is left with a long one when the others are done.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.db.index import Index
from autotax.db.staleness import Place
from autotax.fleet.messages import FleetJob
from autotax.fleet.queue import Due
from autotax.hardware import Hardware
from autotax.software import Environment

NEAREST = 3
"""Problems from which one is estimated that was never tuned."""

Sizes = Mapping[str, Any]


class Took(NamedTuple):
    """An earlier run that came to its end."""

    key: str
    fields: dict[str, Any]
    """Of the problem."""
    kind: str
    seconds: float


def deal(
    jobs: Sequence[FleetJob], winners: Index, hardware: Hardware, software: Environment, earlier: Iterable[Took]
) -> list[Due]:
    """The jobs that are due, in the order in which they are claimed. One that begins anew is due whatever is known."""
    estimate = estimator(earlier, hardware.digest)

    def state(job: FleetJob) -> str:
        here = Place(hardware, software, job.settings.conditions or Conditions.usual(hardware.on_gpu))
        known = [winner for winner in winners.of_problem(job.problem.key) if winner.place.like(here)]
        if job.settings.resume and any(not winner.differences(here) for winner in known):
            return "tuned"
        return "stale" if known else "new"

    ranked = [(state(job), estimate(job.problem), job) for job in jobs]
    due = [each for each in ranked if each[0] != "tuned"]

    def order(each: tuple[str, float | None, FleetJob]) -> tuple[bool, float, int, str]:
        name, seconds, job = each
        return name != "stale", -(seconds or 0.0), -job.problem.nbytes, job.problem.key

    return [Due(job, seconds) for _, seconds, job in sorted(due, key=order)]


def estimator(earlier: Iterable[Took], kind: str) -> Callable[[Problem], float | None]:
    """Seconds that a problem is expected to take: what it took before, on this kind if it was tuned on it; else what the
    problems of the same operator took whose sizes are nearest; None where too little is known.
    """
    took: dict[str, dict[str, float]] = {}
    known: dict[str, dict[str, Sizes]] = {}
    for run in earlier:  # a run that went on where another ended is shorter: the longest counts
        known.setdefault(run.fields["op"], {}).setdefault(run.key, _sizes(run.fields))
        own = took.setdefault(run.key, {})
        own[run.kind] = max(run.seconds, own.get(run.kind, 0.0))
    seconds = {key: found.get(kind, statistics.median(found.values())) for key, found in took.items()}

    def estimate(problem: Problem) -> float | None:
        if problem.key in seconds:
            return seconds[problem.key]
        sizes = _sizes(problem.to_dict())
        others = known.get(problem.op, {})
        nearest = heapq.nsmallest(NEAREST, others, key=lambda key: _distance(sizes, others[key]))
        return statistics.median(seconds[key] for key in nearest) if len(nearest) == NEAREST else None

    return estimate


def _sizes(fields: Mapping[str, Any]) -> Sizes:
    return {name: math.log2(value + 1) if isinstance(value, int) else value for name, value in fields.items()}


def _distance(one: Sizes, other: Sizes) -> float:
    """In doublings; what is no size counts as one if it differs."""
    names = one.keys() | other.keys()
    return sum(_apart(one.get(name), other.get(name)) for name in names)


def _apart(one: object, other: object) -> float:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other)
    return float(one != other)


def seconds_left(due: Sequence[tuple[float | None, bool]], hosts: int, pace: float, usual: float | None) -> float | None:
    """Until `hosts` of a kind are done with what is left: (estimate, in work or not). `pace` is what problems took over what they
    were expected to, `usual` what one takes of which nothing is known. Half of each that is in work is taken for done.
    """
    left = [(estimate * pace if estimate else usual, working) for estimate, working in due]
    if not hosts or any(seconds is None for seconds, _ in left):
        return None
    known = [(seconds or 0.0) * (0.5 if working else 1.0) for seconds, working in left]
    return max(sum(known) / hosts, max(known, default=0.0))


# SLOW HOSTS: two hosts of one kind should take the same time for the same bulk-synchronous call. Who does not is named.

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
