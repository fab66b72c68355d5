"""THRESHOLDS as winners have them: for which numbers of tokens something tuned is faster than a product and a collective.

Servers decide by number of tokens, and freeze such numbers by hand. These come from the database, and hold on this machine.
"""

from __future__ import annotations

from pathlib import Path

from autotax.conditions import Conditions
from autotax.db.buckets import bucket, buckets_up_to
from autotax.db.lookup import peek
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.operators.problems import GemmReduceScatter
from autotax.problem import Problem

MOST_TOKENS = 65536


def token_ranges(
    n: int,
    k: int,
    dtype: str,
    ranks: int,
    *,
    output: str = "replicated",
    most: int = MOST_TOKENS,
    hardware: Hardware | None = None,
    db: str | Path | None = None,
    conditions: Conditions | None = None,
) -> list[tuple[int, int]]:
    """Numbers of tokens, first and last of each range, for which a row-parallel layer has a winner that is not bulk-synchronous.

    The layer's weight is [n, k] on each rank; `output` is "replicated" for an all-reduce, "scattered" for a reduce-scatter.
    """
    ranges: list[tuple[int, int]] = []
    for last in buckets_up_to(most):
        problem: Problem = GemmReduceScatter(last, n, k, dtype, output, ranks)
        answer = peek(problem, hardware=hardware, db=db, conditions=conditions)
        if answer.match == "fallback" or answer.variant == registry.of(problem).baseline:
            continue
        first = bucket(last)[0]
        if ranges and ranges[-1][1] == first - 1:
            first = ranges.pop()[0]
        ranges.append((first, last))
    return ranges
