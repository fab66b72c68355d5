"""Which of two candidates is faster, and how sure that is: medians of paired ratios with distribution-free intervals.

Samples taken in the same round of an interleaved measurement saw the same machine, so the ratio within a round is what
carries information; the interval of its median needs no assumption on the noise (order statistics, Conover 1999, 3.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95


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


def fewest_values(confidence: float = CONFIDENCE) -> int:
    """How many values it takes until their whole range holds the median with this confidence."""
    return 1 + math.ceil(-math.log2(1 - confidence))


def speedup(
    baseline: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, tuple[float, float]]:
    """How many times faster the candidate is: the median of the paired ratios, and its interval."""
    ratios = [b / c for b, c in zip(baseline, candidate, strict=True)]
    return statistics.median(ratios), median_interval(ratios, confidence)
