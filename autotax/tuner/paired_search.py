"""PAIRED SEARCH: each trial is measured in one job with the incumbent, sample by sample in turn.

Figures of different jobs differ by 1.3 to 2.6 %, as clocks and heat do; the ratio of two configs of one job is known to some
tenths of a percent. So what a search compares is the level of the incumbent times the ratio to it. The samples are kept as taken.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from autotax.runner.measurement import Measurement

PAIRED = "paired"
"""Where a measurement's conditions tell of its pair."""


def beside(incumbent: Measurement, again: Measurement, found: Measurement) -> Measurement:
    """`found` with the figure that follows from its job, in which the incumbent was measured `again`; as it is where one of
    them failed.
    """
    level = score_us(incumbent)
    if level is None or not (again.status == found.status == "ok" and again.samples and found.samples):
        return found
    ratio = statistics.median(mine / other for mine, other in zip(found.rounds, again.rounds, strict=True))
    told = {"with": incumbent.config.digest, "ratio": round(ratio, 5), "us": round(level * ratio, 4)}
    return replace(found, conditions=found.conditions | {PAIRED: told})


def score_us(measurement: Measurement) -> float | None:
    """What a search compares, in microseconds: the figure from pairs where there is one, else the latency."""
    paired = measurement.conditions.get(PAIRED)
    return float(paired["us"]) if paired else measurement.latency_us
