"""The bound of a comparison of All-Gather + GEMM: no way of doing it takes less than the product alone, or the links."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotax.hardware import Hardware
from autotax.problem import AllGatherGemm, Problem
from autotax.tuner.compare import PRODUCT, TUNED, Comparison

LINK_GBPS = {"NVIDIA H200": 375.0}
"""What one device takes in from all its peers at once, as measured; nothing is said of others."""


@dataclass(frozen=True)
class Bound:
    """Microseconds. `product_us` is the bare product in the same run, `links_us` the time for the peers' shards to come in."""

    product_us: float
    links_us: float

    @property
    def us(self) -> float:
        return max(self.product_us, self.links_us)


def bound_of(comparison: Comparison) -> Bound | None:
    """None for another operator, for devices whose links are not known, or if the product was not measured."""
    product, links_us = comparison.row(PRODUCT), gather_us(comparison.problem, comparison.hardware)
    if product is None or product.measurement.latency_us is None or links_us is None:
        return None
    return Bound(product.measurement.latency_us, links_us)


def gather_us(problem: Problem, hardware: Hardware) -> float | None:
    """The time for what the peers hold of A, (world size - 1) shards, at the full speed of the links."""
    if not isinstance(problem, AllGatherGemm) or hardware.device not in LINK_GBPS:
        return None
    missing = (problem.world_size - 1) * problem.shard_rows * problem.shard_cols * problem.item_size
    return missing / (LINK_GBPS[hardware.device] * 1e3)


def tuned_us(comparison: Comparison) -> float | None:
    row = comparison.row(TUNED)
    return row.measurement.latency_us if row else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; None without any."""
    there = [math.log(value) for value in values if value is not None]
    return math.exp(statistics.fmean(there)) if there else None


def means(comparisons: Sequence[Comparison], op: str) -> tuple[int, float | None, float | None]:
    """How many problems of an operator were compared, and the geometric means over BSP and over the best peer."""
    found = [c for c in comparisons if c.problem.op == op and c.ok]
    over_bsp = (row.speedup for c in found if (row := c.row(TUNED)))
    return len(found), geometric_mean(over_bsp), geometric_mean(c.over_peer for c in found)
