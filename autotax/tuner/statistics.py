"""Compares two candidates: which is faster, and with what confidence.

Samples taken in the same round of an interleaved job saw the same machine, so the ratio within a round carries the information.
The median ratio of a job is known to a few tenths of a percent (order statistics, Conover 1999, 3.2). Another job, with other
memory, clocks and neighbours, gives another median: recorded repeats differ by 0.7 % (Flash Decode) and 1.4 % (All-Gather + GEMM)
of standard deviation. So a verdict is an `Estimate` over jobs, and its interval contains the result of another job.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autotax.runner.measurement import Measurement

CONFIDENCE = 0.95
JOB_FLOOR, JOB_SHARE = 0.011, 0.3
"""The prior standard deviation between jobs. It is the root of the sum of two squares: JOB_FLOOR, and JOB_SHARE times the
interquartile range of the paired ratios within a job. Both were fitted to recorded repeats of finalist rounds, where ratios that
scatter more within a job differ more between jobs. Intervals of live winners cover 91 % of repeats (71 % with a floor of 0.006;
results/search/coverage.txt).
"""
MOST = 1000.0
"""Larger speed-ups are cut to this: a figure in place is a difference, which noise may bring to zero."""
PRIOR_JOBS = 5
"""Degrees of freedom of the prior standard deviation."""


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """An interval that holds the median with at least this confidence; the whole range when there are too few values."""
    ordered = sorted(values)
    count = len(ordered)
    below = 0.0  # P(at most `rank` values lie below the median)
    rank = -1
    while rank + 1 < count // 2:
        step = math.comb(count, rank + 1) / 2**count
        if below + step > (1 - confidence) / 2:
            break
        below += step
        rank += 1
    rank = max(rank, 0)
    return ordered[rank], ordered[count - 1 - rank]


def speedup(
    baseline: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, tuple[float, float]]:
    """How many times faster the candidate is: the median of the paired ratios, and its interval."""
    ratios = [ratio(b, c) for b, c in zip(baseline, candidate, strict=True)]
    return statistics.median(ratios), median_interval(ratios, confidence)


def ratio(baseline: float, candidate: float) -> float:
    """How many times faster the candidate is in one round, from 1 / MOST to MOST. A figure of zero or less counts as infinitely
    fast. If neither figure is above zero, the ratio is 1.
    """
    if candidate <= 0.0 or baseline <= 0.0:
        return 1.0 if candidate <= 0.0 and baseline <= 0.0 else MOST if candidate <= 0.0 else 1 / MOST
    return min(max(baseline / candidate, 1 / MOST), MOST)


@dataclass(frozen=True)
class Estimate:
    """How many times faster one candidate is than another, from the median paired ratios of one job or more. `deviation` is
    the standard deviation of one job's logarithm."""

    speedup: float
    deviation: float
    jobs: int

    @property
    def another_job(self) -> tuple[float, float]:
        """Interval that contains the median of another job with CONFIDENCE."""
        return self._around(math.sqrt(1 + 1 / self.jobs))

    @property
    def mean(self) -> tuple[float, float]:
        """Interval that contains the mean over many jobs with CONFIDENCE."""
        return self._around(math.sqrt(1 / self.jobs))

    def _around(self, deviations: float) -> tuple[float, float]:
        reach = student(CONFIDENCE, PRIOR_JOBS + self.jobs - 1) * self.deviation * deviations
        return self.speedup * math.exp(-reach), self.speedup * math.exp(reach)


def estimate(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> Estimate:
    """How many times faster the candidate is, from the rounds of each job of both, in microseconds."""
    logs = [
        sorted(math.log(ratio(b, c)) for b, c in zip(*job, strict=True)) for job in zip(baseline, candidate, strict=True)
    ]
    medians = [statistics.median(job) for job in logs]
    ranges = [job[(3 * (len(job) - 1) + 2) // 4] - job[(len(job) - 1) // 4] for job in logs]
    expected = JOB_FLOOR**2 + (JOB_SHARE * statistics.mean(ranges)) ** 2
    middle = statistics.mean(medians)
    squares = sum((median - middle) ** 2 for median in medians)
    variance = (PRIOR_JOBS * expected + squares) / (PRIOR_JOBS + len(medians) - 1)
    return Estimate(math.exp(middle), math.sqrt(variance), len(medians))


@lru_cache(maxsize=64)
def student(confidence: float, freedom: int) -> float:
    """How many standard deviations hold this share of Student's distribution, on both sides together."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(deviations: float, freedom: int) -> float:
    """The share of Student's distribution within `deviations` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(deviations / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    terms = [term] if freedom > 1 else []
    for at in range(3 if odd else 2, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (at - 1) / at
        terms.append(term)
    share = math.sin(angle) * sum(terms)
    return 2 / math.pi * (angle + share) if odd else share


# Paired search: each trial is measured in one job with the incumbent, sample by sample in turn.

PAIRED = "paired"
"""The key in a measurement's conditions that holds the facts of its pair."""


def beside(incumbent: Measurement, again: Measurement, measured: Measurement) -> Measurement:
    """`measured` with the figure that follows from its job, in which the incumbent was measured `again`. If one of the two
    failed, `measured` is returned unchanged.
    """
    level = score_us(incumbent)
    if level is None or not (again.status == measured.status == "ok" and again.samples and measured.samples):
        return measured
    ratio = statistics.median(mine / other for mine, other in zip(measured.rounds, again.rounds, strict=True))
    pair = {"with": incumbent.config.digest, "ratio": round(ratio, 5), "us": round(level * ratio, 4)}
    return replace(measured, conditions=measured.conditions | {PAIRED: pair})


def score_us(measurement: Measurement) -> float | None:
    """The figure that a search compares, in microseconds: the figure from the pair if there is one, else the latency."""
    paired = measurement.conditions.get(PAIRED)
    return float(paired["us"]) if paired else measurement.latency_us


# Suspiciously fast configs are measured again, and the slower figure of the two is kept.

SUSPICIOUS = 0.75
"""A latency below this share of the best so far is doubted ..."""
KNOWN = 5
"""... once this many figures are known."""
ALIKE = 0.1
"""Figures that differ by a smaller share agree."""


def doubtful(measurement: Measurement, measured: Sequence[Measurement]) -> bool:
    """Whether a measurement is suspiciously fast after those before it."""
    before = [m.latency_us for m in measured if m.status == "ok" and m.latency_us is not None]
    if measurement.status != "ok" or measurement.latency_us is None or len(before) < KNOWN:
        return False
    return measurement.latency_us < SUSPICIOUS * min(before)


def settled(first: Measurement, again: Measurement) -> tuple[Measurement, str | None]:
    """Chooses between a doubted measurement and its repetition; returns the slower, and a notice if they do not agree."""
    first_us, again_us = first.latency_us, again.latency_us
    assert first_us is not None
    stands = first if again.status == "ok" and again_us is not None and again_us <= first_us else again
    stands = replace(stands, conditions=stands.conditions | {"measured_again": first_us})
    if again_us is not None and again.verified and abs(again_us - first_us) <= ALIKE * first_us:
        return stands, None
    second = f"{again_us:.1f} us" if again_us is not None else again.status
    return stands, f"{first.config} took {first_us:.1f} us, suspiciously little; measured again: {second}, and the worse stands"
