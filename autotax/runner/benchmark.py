"""One candidate on one rank. Each stage is one method: prepare, compile, verify, capture and sample.

Stages raise errors. The module `stages` catches them and lets all ranks agree on the outcome before the next stage.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autotax.core.problem import Problem
from autotax.kernels import prepare
from autotax.kernels.alignment import delay
from autotax.kernels.context import Context
from autotax.operators.verification import TOLERANCE, farthest, relative_error
from autotax.runner.measurement import Candidate
from autotax.runner.series import Batch, InputCache, Series

if TYPE_CHECKING:
    from autotax.kernels.kernel import Kernel
    from autotax.runner.series import Surroundings


MODEST_CALLS, FEW_CALLS = 10, 4
"""Least calls of a sample, usually and if one call takes LONG_CALL_US. Rotating inputs and short graphs need more."""
LONG_CALL_US = 1000.0
SAMPLE_US = 1000.0
"""A replay takes about this long at least. Starting a replay costs 10 to 14 us, which should be less than 2 % of a sample."""
RECHECKED = 2
"""Input sets whose outputs are compared again after the timing."""


class WrongResult(Exception):
    """The output is not within the tolerance of the reference."""


class KernelTimeout(Exception):
    """A wait inside a kernel timed out; the message names the waiting rank and the missing rank."""


class Bench:
    """A candidate made ready on this rank."""

    def __init__(self, problem: Problem, candidate: Candidate, context: Context, inputs: InputCache) -> None:
        self.problem = problem
        self.candidate = candidate
        self.context = context
        self.inputs = inputs
        self.on_gpu = context.heap.slab.is_cuda
        self.seeds = inputs.timed(candidate.conditions)
        self.compile_s = 0.0
        self.relative_error = 0.0
        self.series: list[Series] = []
        """The series to time. First the calls; in place also the surrounding products without the calls, and the calls back to
        back.
        """

    def allocate(self) -> None:
        """Workspaces of the operator. Collective."""
        self.operator = prepare(self.problem, self.candidate.config, self.context)

    def compile(self) -> None:
        """Compiles and loads every kernel without running one, so that no rank compiles while its peers spin."""
        started = time.perf_counter()
        first = self.inputs.get(0)
        with self.context.rehearsal():
            self.operator(*first.tensors, first.out)
        self.compile_s = time.perf_counter() - started

    def verify(self, seed: int) -> None:
        """One call with the inputs of a seed, its output poisoned before. Raises WrongResult, KernelTimeout."""
        batch = Batch(self.operator, self.inputs, [seed], graph=False)
        batch.poison()
        batch.run()
        self._check(seed, batch.results[0])

    def rehearse(self) -> float:
        """Runs the calls that will be timed, one by one. Returns a first estimate of microseconds a call."""
        batch = Batch(self.operator, self.inputs, self.seeds, graph=False)
        batch.run()
        self.context.world.synchronize()
        started = time.perf_counter()
        batch.run()
        self.context.world.synchronize()
        return (time.perf_counter() - started) / len(self.seeds) * 1e6

    def least_calls(self, call_us: float) -> int:
        """The least number of calls of a sample if one call takes `call_us`, for graphs and eager calls alike."""
        return MODEST_CALLS if call_us < LONG_CALL_US else FEW_CALLS

    def capture(self, calls: int, call_us: float) -> None:
        """Sets the calls of a sample to `calls` or a few more. Captures them in graphs if the candidate's conditions say so.

        `call_us` is the time of one call with the work around it. It must be the same on all ranks.
        """
        if not self.on_gpu:
            seeds = [self.seeds[:1]]
        elif self.candidate.conditions.skew_us:  # the skew affects only the first call after an arrival
            seeds = [[seed] for seed in self.seeds]
        else:
            seeds = [self.seeds * math.ceil(calls / len(self.seeds))]
        sample_us = len(seeds[0]) * call_us
        kinds: list[tuple[Kernel | None, Surroundings | None]] = [(self.operator, None)]
        if self.candidate.conditions.in_place:
            around = self.inputs.surroundings
            kinds = [(self.operator, around), (None, around), (self.operator, None)]
        self.series = [
            Series(
                [Batch(operator, self.inputs, some, self.captured, around) for some in seeds],
                captured=self.captured,
                estimate_us=sample_us,
            )
            for operator, around in kinds
        ]

    @property
    def captured(self) -> bool:
        """Whether calls are captured in graphs."""
        return self.on_gpu and self.candidate.conditions.launch == "graph"

    @property
    def extends(self) -> bool:
        """Whether a sample has enough calls to make the cost of its start negligible."""
        return self.captured and not self.candidate.conditions.skew_us

    def replay(self) -> float:
        """Replays the first graph. Returns the microseconds of a call on this rank, with the work around it."""
        series = self.series[0]
        series.run(0)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        series.run(0)
        end.record()
        self.context.world.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / series.calls

    def batch(self, seeds: list[int]) -> Batch:
        """Calls with the inputs of these seeds, launched as the candidate's conditions say."""
        return Batch(self.operator, self.inputs, seeds, self.captured)

    @property
    def typical_us(self) -> float:
        """The time of a call according to the first samples, the same on all ranks."""
        without_us = self.series[1].typical_us if self.candidate.conditions.in_place else 0.0
        return (self.series[0].typical_us - without_us) / self.series[0].calls

    def recheck(self) -> None:
        """Verifies the outputs of the timed calls: poisons the outputs, runs the calls again and compares. Raises WrongResult."""
        batches = self.series[0].batches[:RECHECKED]
        for batch in batches:
            batch.poison()
        for batch in batches:  # all run before the first comparison: a rank that raises must not leave its peers in a call
            batch.run()
        for batch in batches:
            results = dict(zip(batch.seeds, batch.results, strict=True))
            for seed in list(results)[:RECHECKED]:
                self._check(seed, results[seed])

    def check_waits(self) -> None:
        """Waits for the device. Raises KernelTimeout if a wait inside a kernel timed out."""
        self.context.world.synchronize()
        if failure := self.operator.failure():
            raise KernelTimeout(failure)

    def check_error(self, error: float, where: str) -> None:
        """Notes the relative error of a result. Raises WrongResult if it is too great."""
        self.relative_error = max(self.relative_error, error)
        allowed = TOLERANCE[self.problem.out_dtype]
        if not error <= allowed:
            raise WrongResult(f"rank {self.context.rank}: relative error {error:.3g} {where}, allowed {allowed:g}")

    def _check(self, seed: int, result: Tensor) -> None:
        self.check_waits()
        self.check_error(relative_error(result, self.inputs.reference(seed), self.inputs.get(seed)), f"on input set {seed}")


# The soak: thousands of replays with ranks that arrive at random times and inputs that change, every output compared.

LONGEST_DELAY_US = 50.0
CHUNK = 100
"""Replays between two agreements of the ranks."""
CHUNK_US = 1e6
"""Upper bound for the time of a chunk, which has fewer replays if calls are slow."""


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
        """Runs some replays and compares every output. Raises WrongResult for the first wrong one, KernelTimeout."""
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
        """Enqueues a call with each input set, then the comparisons. Returns one error for each set, on the device."""
        for batch in batches:
            batch.poison()
        for batch in batches:
            # About half of the calls follow without a delay.
            if (us := self._delays.uniform(-LONGEST_DELAY_US, LONGEST_DELAY_US)) > 0:
                delay(self.bench.context, us)
            batch.run()
            out, result = batch.calls[0].out, batch.results[0]
            if result is not out:  # the next call may overwrite `result`
                out.copy_(result)
        references = self.bench.inputs.reference
        return [farthest(batch.calls[0].out, references(batch.seeds[0]), batch.calls[0]) for batch in batches]
