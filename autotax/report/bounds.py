"""The bound of a comparison: no way of doing it takes less than the product alone or the links (All-Gather + GEMM), or than
reading the cache once as fast as a copy moves bytes (Flash Decode)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotax.hardware import Hardware
from autotax.problem import AllGatherGemm, FlashDecode, Problem
from autotax.tuner.compare import PRODUCT, TUNED, Comparison

LINK_GBPS = {"NVIDIA H200": 375.0}
"""What one device takes in from all its peers at once, as measured; nothing is said of others."""


@dataclass(frozen=True)
class Bound:
    """Microseconds, None where it says nothing. `product_us` is the bare product in the same run, `links_us` the time for the
    peers' shards to come in, `memory_us` that for a rank's part of the cache at the rate of a copy in the same run."""

    product_us: float | None = None
    links_us: float | None = None
    memory_us: float | None = None

    @property
    def us(self) -> float:
        return max(us for us in (self.product_us, self.links_us, self.memory_us) if us is not None)


def bound_of(comparison: Comparison) -> Bound | None:
    """None for devices whose links are not known, or if what it takes was not measured."""
    if isinstance(comparison.problem, FlashDecode):
        memory_us = cache_us(comparison)
        return Bound(memory_us=memory_us) if memory_us else None
    product, links_us = comparison.row(PRODUCT), gather_us(comparison.problem, comparison.hardware)
    if product is None or product.measurement.latency_us is None or links_us is None:
        return None
    return Bound(product.measurement.latency_us, links_us)


def cache_us(comparison: Comparison) -> float | None:
    """The time to read a rank's keys and values once; None on CPU ranks, or if the tuned config was not measured."""
    problem, row = comparison.problem, comparison.row(TUNED)
    rates = row.measurement.conditions.get("copy_gbps") if row else None
    if not isinstance(problem, FlashDecode) or not rates or not comparison.hardware.on_gpu:
        return None
    tokens = 2 * problem.batch * problem.kv_heads * problem.shard_len
    return tokens * problem.head_dim * problem.item_size / (min(rates) * 1e3)


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
