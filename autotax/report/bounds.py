"""The bound of a comparison: no call takes less than the part of the work that was measured alone, nor than what an operator's
declaration tells of the links and of memory. What a verified row goes below is no bound, and is not shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotax.operators import registry
from autotax.tuner.compare import TUNED, Comparison


@dataclass(frozen=True)
class Bound:
    """Microseconds of each bound by what it is, for instance `the links at full rate`."""

    parts: dict[str, float]

    @property
    def us(self) -> float:
        """The greatest."""
        return max(self.parts.values())


def known_us(comparison: Comparison) -> dict[str, float]:
    """The declared bounds that are known here and that no row goes below, microseconds by name."""
    row = comparison.row(TUNED)
    rates = row.measurement.conditions if row else {}
    found = registry.of(comparison.problem).bounds_us(comparison.problem, comparison.hardware, rates)
    return {name: us for name, us in found.items() if us <= _fastest_us(comparison)}


def _fastest_us(comparison: Comparison) -> float:
    """The least that any verified way of doing all of the work takes."""
    part = registry.of(comparison.problem).part
    whole = [row for row in comparison.rows if row.measurement.verified and not (part and row.name == part.row)]
    return min((row.measurement.latency_us or math.inf for row in whole), default=math.inf)


def bound_of(comparison: Comparison) -> Bound | None:
    """None unless all bounds that the operator declares are known, and its part was measured."""
    operator, known = registry.of(comparison.problem), known_us(comparison)
    parts: dict[str, float] = {}
    if operator.part:
        row = comparison.row(operator.part.row)
        if row is None or row.measurement.latency_us is None or row.measurement.latency_us > _fastest_us(comparison):
            return None
        parts[operator.part.part] = row.measurement.latency_us
    if operator.bounds.keys() != known.keys():
        return None
    parts |= {operator.bounds[name]: us for name, us in known.items()}
    return Bound(parts) if parts else None


def tuned_us(comparison: Comparison) -> float | None:
    row = comparison.row(TUNED)
    return row.measurement.latency_us if row else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; None without any."""
    there = [math.log(value) for value in values if value is not None]
    return math.exp(statistics.fmean(there)) if there else None


def means(comparisons: Sequence[Comparison], op: str) -> tuple[int, float | None, float | None]:
    """How many problems of an operator were compared, and the geometric means over BSP and over the best alternative."""
    found = [c for c in comparisons if c.problem.op == op and c.ok]
    over_bsp = (row.speedup for c in found if (row := c.row(TUNED)))
    return len(found), geometric_mean(over_bsp), geometric_mean(c.over_peer for c in found)
