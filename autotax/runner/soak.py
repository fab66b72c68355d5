"""The soak: thousands of replays with ranks that arrive at random times and inputs that change, every output compared.

A few verifying calls miss an error that happens once in a thousand calls. Replays come in bursts, one for each input set in
random order, and outputs are compared after a burst. A comparison after each call would give a late rank time to catch up. It
would hide a rank that runs into the next call while a peer is still in the last one.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from autotax.kernels.delay import delay
from autotax.operators.verification import distance
from autotax.runner.batch import Batch
from autotax.runner.benchmark import Bench

LONGEST_DELAY_US = 50.0
CHUNK = 100
"""Replays between two agreements of the ranks."""
CHUNK_US = 1e6
"""A chunk of slow calls is shorter: it should take no longer than this."""


class Soak:
    """One candidate's soak on this rank. All ranks must call `prepare` once, then `go_on` until nothing is `left`."""

    def __init__(self, bench: Bench, replays: int, seed: int, call_us: float) -> None:
        self.bench = bench
        self.replays = replays
        self.done = 0
        self._chunk = max(1, min(CHUNK, int(CHUNK_US / max(call_us, 1.0))))
        self._order = random.Random(f"{seed}/order")
        self._delays = random.Random(f"{seed}/delays/{bench.context.rank}")
        self._batches: list[Batch] = []

    @property
    def left(self) -> int:
        return self.replays - self.done

    def prepare(self) -> None:
        """Makes one call ready for each input set."""
        self._batches = [self.bench.batch([seed]) for seed in self.bench.inputs.soaked]

    def go_on(self) -> None:
        """Some replays, all of them compared. Raises WrongResult for the first wrong one, KernelTimeout."""
        count = min(self._chunk, self.left)
        errors: list[Tensor] = []
        seeds: list[int] = []
        while len(errors) < count:
            burst = self._order.sample(self._batches, len(self._batches))[: count - len(errors)]
            errors += self._burst(burst)
            seeds += [batch.seeds[0] for batch in burst]
        self.bench.check_waits()
        for number, (seed, error) in enumerate(zip(seeds, torch.stack(errors).tolist(), strict=True), self.done + 1):
            self.bench.check_error(error, f"in replay {number} of {self.replays}, input set {seed}")
        self.done += count

    def _burst(self, batches: list[Batch]) -> list[Tensor]:
        """Enqueues a call with each input set, then the comparisons: an error for each, on the device."""
        for batch in batches:
            batch.poison()
        for batch in batches:
            # About half of the calls follow at once.
            if (us := self._delays.uniform(-LONGEST_DELAY_US, LONGEST_DELAY_US)) > 0:
                delay(self.bench.context, us)
            batch.run()
            out, result = batch.calls[0].out, batch.results[0]
            if result is not out:  # it is where the next call may write its own
                out.copy_(result)
        references = self.bench.inputs.reference
        return [distance(batch.calls[0].out, references(batch.seeds[0])) for batch in batches]
