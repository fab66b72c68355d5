"""Samples of one kind: batches that the samples take in turn, and what each sample took on this rank."""

from __future__ import annotations

from collections.abc import Sequence

from autotax.runner.batch import Batch

LEAD_BELOW_US = 5000.0
"""A sample shorter than this has a lead. After some milliseconds of idling a replay takes 30 to 60 us longer."""


class Series:
    """`us` holds the microseconds of whole samples on this rank; `typical_us` is what one takes on the slowest rank, first by an
    estimate. It is the same on all ranks.
    """

    def __init__(self, batches: Sequence[Batch], *, captured: bool, estimate_us: float) -> None:
        self.batches = batches
        self.captured = captured
        self.lead = estimate_us < LEAD_BELOW_US
        """Whether a device runs the sample once before it is timed, so that it follows itself, whatever ran before."""
        self.us: list[float] = []
        self.typical_us = estimate_us

    @property
    def calls(self) -> int:
        """Calls of one sample, or places of calls."""
        return len(self.batches[0].calls)

    def run(self, number: int) -> None:
        """Enqueues the sample of this number."""
        self.batches[number % len(self.batches)].run()
