"""Timing candidates: samples taken in turn, so that whatever disturbs the machine disturbs all candidates alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from autotax.kernels.align import Aligner
from autotax.kernels.context import Context
from autotax.kernels.delay import delay
from autotax.runner.measurement import Effort
from autotax.runner.trial import Trial

WARM_UP_SAMPLES = 2
FIRST_SAMPLES = 3
"""Samples after which a hopeless candidate is given up."""
SUSPICIOUS = 0.8
"""A sample faster than this share of its candidate's median is taken again."""
MOST_AGAIN = 3
"""How often it is taken again; what is as fast every time is believed."""
EXCEPTIONS = 0.25
"""If more samples than this share are suspicious, none is: that is how the candidate's times are distributed."""
LEAD_US = 100.0
"""The device waits so long before ranks are aligned and skewed, for the host to have enqueued all that follows."""


class Sampler:
    """Takes the samples of one job. All ranks decide from figures of all ranks, and so alike.

    `alive` is called before each round of calls that take their time, so that a deadline is one for a round, not for all.
    """

    def __init__(self, context: Context, aligner: Aligner, seed: int, alive: Callable[[], None] = lambda: None) -> None:
        self.context = context
        self.world = context.world
        self.aligner = aligner
        self.seed = seed
        self._alive = alive
        self._number = 0

    def sample(self, trials: Sequence[Trial], effort: Effort) -> None:
        """Fills in the samples of all trials, gives up the hopeless ones, and takes suspicious samples again. Collective."""
        started = time.perf_counter()
        self._take(trials, WARM_UP_SAMPLES)
        for trial in trials:
            trial.samples.clear()
        self._take(trials, FIRST_SAMPLES)
        # The median: one disturbed sample must not end a good candidate.
        typical = self.world.gather([statistics.median(trial.samples) for trial in trials], list[float])
        first_us = [max(ranks) for ranks in zip(*typical, strict=True)]
        if effort.give_up_us is not None:
            for trial, us in zip(trials, first_us, strict=True):
                trial.given_up = us > effort.give_up_us
        going_on = [trial for trial in trials if not trial.given_up]
        round_s = sum(us * trial.bench.calls for trial, us in zip(trials, first_us, strict=True)) / 1e6
        affordable = int(effort.seconds * len(trials) / max(round_s, 1e-9))
        rounds = min(effort.samples - FIRST_SAMPLES, max(effort.fewest - FIRST_SAMPLES, affordable))
        if going_on and rounds > 0:
            self._take(going_on, rounds)
            # Where ranks arrive at random times, a fast sample is a lucky arrival.
            self._take_again([trial for trial in going_on if not trial.bench.candidate.conditions.skew_us])
        for trial in trials:
            trial.device_s += (time.perf_counter() - started) / len(trials)

    def _take(self, trials: Sequence[Trial], rounds: int) -> None:
        timers = []
        for r in range(rounds):
            if self.world.device.type == "cpu":  # a device is only given its work here
                self._alive()
            timers += [(trial, self._timed(trial, self._number + r)) for trial in _rotated(trials, r)]
        self._number += rounds
        self.world.synchronize()
        for trial, elapsed_us in timers:
            trial.samples.append(elapsed_us() / trial.bench.calls)

    def _take_again(self, trials: Sequence[Trial]) -> None:
        for _ in range(MOST_AGAIN):
            taken = self.world.gather([trial.samples for trial in trials], list[list[float]])
            suspects = [(trial, at) for trial, *ranks in zip(trials, *taken, strict=True) for at in suspicious(ranks)]
            if not suspects:
                return
            timers = [(trial, at, self._timed(trial, self._number + i)) for i, (trial, at) in enumerate(suspects)]
            self._number += len(suspects)
            self.world.synchronize()
            for trial, at, elapsed_us in timers:
                trial.samples[at] = elapsed_us() / trial.bench.calls
                trial.remeasured += 1

    def _timed(self, trial: Trial, number: int) -> Callable[[], float]:
        """Runs (or enqueues) one sample; the result, asked for after synchronizing, is its microseconds.

        With an arrival skew the sample begins for all ranks at the time at which the first could arrive. The maximum over
        the ranks is the time from there to the last result, with the wait for the last to arrive. Candidates of
        one round meet the same arrivals, so their ratios compare like with like.
        """
        skew_us = trial.bench.candidate.conditions.skew_us
        late_us = arrival_us(skew_us, self.seed, self.world.rank, number)
        if self.world.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if skew_us:
                delay(self.context, LEAD_US)
            self.aligner()
            start.record()
            if skew_us:
                delay(self.context, late_us)
            trial.bench.run(number)
            end.record()
            return lambda: start.elapsed_time(end) * 1e3
        self.world.barrier()
        started = time.perf_counter()
        if skew_us:
            delay(self.context, late_us)
        trial.bench.run(number)
        elapsed = (time.perf_counter() - started) * 1e6
        return lambda: elapsed


def arrival_us(skew_us: float, seed: int, rank: int, number: int) -> float:
    """How late a rank arrives at the sample of this number: from 0 to `skew_us`, other for each rank and sample."""
    return skew_us * random.Random(f"{seed}/{rank}/{number}").random() if skew_us else 0.0


def suspicious(ranks: Sequence[Sequence[float]]) -> list[int]:
    """Which samples of a candidate, given by rank, are too fast to be believed unseen."""
    rounds = [max(sample) for sample in zip(*ranks, strict=True)]
    found = [at for at, us in enumerate(rounds) if us < SUSPICIOUS * statistics.median(rounds)]
    return found if len(found) <= EXCEPTIONS * len(rounds) else []


def _rotated(trials: Sequence[Trial], by: int) -> Iterator[Trial]:
    return (trials[(i + by) % len(trials)] for i in range(len(trials)))
