"""How a job takes its samples: the yardstick beside them, and the order of candidates.

The yardstick is a fixed piece of local work. Its time shows the current speed of a rank's device. It needs no other rank. So a
slow rank, lowered clocks or a shared machine show in it and are not mistaken for a property of a candidate. The minimum over the
repeats suppresses transient noise.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce

import torch

from autotax.heap import World
from autotax.kernels.alignment import Aligner, delay
from autotax.kernels.context import Context
from autotax.runner.benchmark import Series, Trial
from autotax.runner.measurement import Effort
from autotax.runner.yardsticks import Reading

GPU_REPEATS = 4
CPU_REPEATS = 10


class Yardstick:
    """One rank's fixed work: a matrix product and a copy, about 0.2 ms on an H200, and half a millisecond on a CPU core."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._on_gpu = world.device.type == "cuda"
        size, copied = (2048, 256 << 20) if self._on_gpu else (256, 1 << 20)
        dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._a = torch.ones(size, size, dtype=dtype, device=world.device)
        self._product = torch.empty_like(self._a)
        self._source = torch.zeros(copied, dtype=torch.uint8, device=world.device)
        self._copy = torch.empty_like(self._source)
        self.measure()  # loads the library

    def measure(self) -> Reading:
        """The best of a few repeats. Waits for the device."""
        readings = self._on_device() if self._on_gpu else [self._on_cpu() for _ in range(CPU_REPEATS)]
        return reduce(Reading.best, readings)

    def _multiply(self) -> None:
        torch.mm(self._a, self._a, out=self._product)

    def _move(self) -> None:
        self._copy.copy_(self._source)

    def _reading(self, product_us: float, copy_us: float) -> Reading:
        return Reading(product_us + copy_us, 2 * self._source.numel() / copy_us / 1e3)

    def _on_device(self) -> list[Reading]:
        """Enqueues everything at once, behind a first product, so that the device never waits for the host."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * GPU_REPEATS + 1)]
        self._multiply()
        marks[0].record()
        for product_done, copy_done in zip(marks[1::2], marks[2::2], strict=True):
            self._multiply()
            product_done.record()
            self._move()
            copy_done.record()
        self.world.synchronize()
        times = [first.elapsed_time(second) * 1e3 for first, second in itertools.pairwise(marks)]
        return [self._reading(product, copy) for product, copy in zip(times[::2], times[1::2], strict=True)]

    def _on_cpu(self) -> Reading:
        return self._reading(_wall_us(self._multiply), _wall_us(self._move))


def _wall_us(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


# Timing of candidates. Samples are taken in turn, so that a disturbance of the machine hits all candidates alike.

Row = tuple[Trial, Series]
"""A series of a trial. Each row has one sample in each round."""

WARM_UP_SAMPLES = 2
FIRST_SAMPLES = 3
"""Number of first samples that decide whether a candidate is given up as hopeless."""
SUSPICIOUS = 0.8
"""A sample faster than this share of its candidate's median is taken again."""
MOST_AGAIN = 3
"""Most repetitions of a suspicious sample. If every repetition is as fast, the sample is believed."""
EXCEPTIONS = 0.25
"""If a larger share of the samples is suspicious, none is repeated: the candidate's times are simply distributed like that."""
LEAD_US = 100.0
"""Delay on the device before ranks are aligned and skewed. In this time the host enqueues the rest of the sample."""


class Sampler:
    """Takes the samples of one job. Every rank decides from the figures of all ranks, so all decide alike.

    `alive` is called before each round of long calls, so that the deadline applies to a round and not to the whole job.
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
        rows = _rows(trials)
        order = self._order(rows)
        self._take(rows, order, WARM_UP_SAMPLES)
        for _, series in rows:
            series.us.clear()
        self._take(rows, order, FIRST_SAMPLES)
        # Uses the median, because one disturbed sample must not end a good candidate.
        typical = self.world.gather([statistics.median(series.us) for _, series in rows], list[float])
        for (_, series), *ranks in zip(rows, *typical, strict=True):
            series.typical_us = max(ranks)
        if effort.give_up_us is not None:
            for trial in trials:
                trial.given_up = trial.bench.typical_us > effort.give_up_us
        going_on = [trial for trial in trials if not trial.given_up]
        round_s = sum(series.typical_us * (2 if series.lead else 1) for _, series in rows) / 1e6
        affordable = int(effort.seconds * len(trials) / max(round_s, 1e-9))
        rounds = min(effort.samples - FIRST_SAMPLES, max(effort.fewest - FIRST_SAMPLES, affordable))
        if going_on and rounds > 0:
            left = _rows(going_on)
            self._take(left, order if len(left) == len(rows) else self._order(left), rounds)
            # If ranks arrive at random times, a fast sample is only a lucky arrival.
            self._take_again([row for row in left if not row[0].bench.candidate.conditions.skew_us])
        self._conclude(trials)
        for trial in trials:
            trial.device_s += (time.perf_counter() - started) / len(trials)

    def _order(self, rows: Sequence[Row]) -> BalancedOrder:
        """The order of the rows, equal on all ranks and different for each job and number of rows."""
        return BalancedOrder(len(rows), f"{self.seed}/order/{len(rows)}")

    def _take(self, rows: Sequence[Row], order: BalancedOrder, rounds: int) -> None:
        timers = []
        for r in range(rounds):
            if self.world.device.type == "cpu":  # on a GPU the work is only enqueued here
                self._alive()
            for trial, series in (rows[place] for place in order.next_round()):
                timers.append((series, self.timed(trial, series, self._number + r)))
        self._number += rounds
        self.world.synchronize()
        for series, elapsed_us in timers:
            series.us.append(elapsed_us())

    def _take_again(self, rows: Sequence[Row]) -> None:
        for _ in range(MOST_AGAIN):
            taken = self.world.gather([series.us for _, series in rows], list[list[float]])
            suspects = [(rows[place], at) for place, ranks in enumerate(zip(*taken, strict=True)) for at in suspicious(ranks)]
            if not suspects:
                return
            timers = [(row, at, self.timed(*row, self._number + i)) for i, (row, at) in enumerate(suspects)]
            self._number += len(suspects)
            self.world.synchronize()
            for (trial, series), at, elapsed_us in timers:
                series.us[at] = elapsed_us()
                trial.remeasured += 1

    def _conclude(self, trials: Sequence[Trial]) -> None:
        """Makes samples from the times of the series.

        In place, a rank's sample is its time with calls minus the time of the slowest rank without calls. So the maximum over the
        ranks is a difference of two maxima: the time that the calls add until all ranks are done.
        """
        placed = [trial for trial in trials if trial.bench.candidate.conditions.in_place]
        kinds = [[series.us for series in trial.bench.series[1:]] for trial in placed]
        taken = self.world.gather(kinds, list[list[list[float]]]) if placed else []
        for trial in trials:
            main = trial.bench.series[0]
            if trial not in placed:
                trial.samples = [us / main.calls for us in main.us]
                continue
            ranks = [rank[placed.index(trial)] for rank in taken]
            without, alone = ([max(us) for us in zip(*kind, strict=True)] for kind in zip(*ranks, strict=True))
            trial.samples = [(us - least) / main.calls for us, least in zip(main.us, without, strict=True)]
            trial.readings = {
                "back_to_back_us": statistics.median(alone) / trial.bench.series[2].calls,
                "between_us": statistics.median(without) / (main.calls + 1),
            }

    def timed(self, trial: Trial, series: Series, number: int) -> Callable[[], float]:
        """Runs (or enqueues) one sample. The returned function gives its microseconds; call it after synchronizing.

        With an arrival skew the sample begins for all ranks at the time at which the first could arrive. The maximum over the
        ranks is the time from there to the last result, including the wait for the last rank. Candidates of one round meet the
        same arrivals, so their ratios compare like with like.
        """
        skew_us = trial.bench.candidate.conditions.skew_us
        late_us = arrival_us(skew_us, self.seed, self.world.rank, number)
        if self.world.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if skew_us:
                delay(self.context, LEAD_US)
            elif series.lead:
                series.run(number)
            if not (series.captured or skew_us):  # else the host launches ahead while the device is busy
                self.world.synchronize()
            self.aligner()
            start.record()
            if skew_us:
                delay(self.context, late_us)
            series.run(number)
            end.record()
            return lambda: start.elapsed_time(end) * 1e3
        self.world.barrier()
        started = time.perf_counter()
        if skew_us:
            delay(self.context, late_us)
        series.run(number)
        elapsed = (time.perf_counter() - started) * 1e6
        return lambda: elapsed


def arrival_us(skew_us: float, seed: int, rank: int, number: int) -> float:
    """The delay of a rank at the sample of this number, from 0 to `skew_us`; it differs by rank and sample."""
    return skew_us * random.Random(f"{seed}/{rank}/{number}").random() if skew_us else 0.0


def suspicious(ranks: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the samples that are too fast to be believed without a repetition. `ranks` holds the samples of each rank."""
    rounds = [max(sample) for sample in zip(*ranks, strict=True)]
    indices = [at for at, us in enumerate(rounds) if us < SUSPICIOUS * statistics.median(rounds)]
    return indices if len(indices) <= EXCEPTIONS * len(rounds) else []


def _rows(trials: Sequence[Trial]) -> list[Row]:
    return [(trial, series) for trial in trials for series in trial.bench.series]


# The order of samples.

class BalancedOrder:
    """An endless sequence of rounds, each a permutation of `rows` numbers. Equal seeds give equal rounds.

    No row follows itself across the end of a round, unless it is the only one. For an odd number n of rows, the adjacency counts
    of two ordered pairs differ by at most one after each n - 1 rounds. For an even number they differ by at most four after any
    number of rounds.
    """

    def __init__(self, rows: int, seed: str) -> None:
        self._random = random.Random(seed)
        names = list(range(rows))
        self._random.shuffle(names)
        self._designs = [[names[place] for place in design] for design in designs(rows)]
        self._taken: Counter[int] = Counter()
        self._across: Counter[tuple[int, int]] = Counter()
        self._last: int | None = None

    def next_round(self) -> list[int]:
        """The rows in the order of sampling. Among the designs used about equally often, it takes one whose first row has
        followed the previous round's last row least often.
        """
        taken = [self._taken[number] for number in range(len(self._designs))]
        early = [max(0, count - min(taken) - 1) for count in taken]
        fit = [number for number, design in enumerate(self._designs) if design[0] != self._last or len(design) == 1]
        chosen = min(fit, key=lambda number: (early[number], self._follows(number), taken[number], self._random.random()))
        design = self._designs[chosen]
        self._taken[chosen] += 1
        if self._last is not None:
            self._across[self._last, design[0]] += 1
        self._last = design[-1]
        return list(design)

    def _follows(self, number: int) -> int:
        return self._across[self._last, self._designs[number][0]] if self._last is not None else 0


def designs(rows: int) -> list[list[int]]:
    """The rounds of a Williams design (E. J. Williams, 1949). If `rows` is even, each ordered pair is adjacent in exactly one
    round. If it is odd, the last row opens every round, and the others follow in an even design.
    """
    even = rows - rows % 2
    start = [even] if rows % 2 else []
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(even)]
    return [start + [(first + step) % even for step in zigzag] for first in range(max(1, even))]
