"""One candidate on one rank: prepared, compiled, verified, captured and sampled. Each stage is one method.

Stages raise; `stages` catches, and lets all ranks agree on the outcome before the next stage.
"""

from __future__ import annotations

import math
import time

from torch import Tensor

from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.operators.expected import TOLERANCE, relative_error
from autotax.problem import Problem
from autotax.runner.batch import Batch
from autotax.runner.inputs import InputCache
from autotax.runner.measurement import Candidate

MODEST_CALLS = 10
"""Calls a graph captures, unless rotating the inputs takes more; fewer when calls are long."""
LONG_CALL_US = 1000.0
RECHECKED = 2
"""Input sets whose outputs are compared again after the timing."""


class WrongResult(Exception):
    """The output is not within the tolerance of the reference."""


class KernelTimeout(Exception):
    """A wait inside a kernel gave up; the message says who waited for whom."""


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
        self.samples: list[Batch] = []
        """What is timed. The samples take these in turn: all calls together, or one call each where ranks arrive skewed,
        because only the first call after an arrival meets it."""

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
        """Runs what will be timed, call by call. Returns a first estimate of microseconds a call."""
        batch = Batch(self.operator, self.inputs, self.seeds, graph=False)
        batch.run()
        self.context.world.synchronize()
        started = time.perf_counter()
        batch.run()
        self.context.world.synchronize()
        return (time.perf_counter() - started) / len(self.seeds) * 1e6

    def capture(self, estimate_us: float) -> None:
        """Fixes the calls of a sample, and captures them in a graph if the candidate is to be measured so."""
        if not self.on_gpu:
            self.samples = [self.batch(self.seeds[:1])]
        elif self.candidate.conditions.skew_us:
            self.samples = [self.batch([seed]) for seed in self.seeds]
        else:
            wanted = MODEST_CALLS if estimate_us < LONG_CALL_US else 4
            self.samples = [self.batch(self.seeds * math.ceil(wanted / len(self.seeds)))]

    def batch(self, seeds: list[int]) -> Batch:
        """Calls with the inputs of these seeds, made as the candidate's calls are to be made."""
        return Batch(self.operator, self.inputs, seeds, self.on_gpu and self.candidate.conditions.mode == "graph")

    @property
    def calls(self) -> int:
        """Calls of one sample."""
        return len(self.samples[0].calls)

    def run(self, number: int) -> None:
        """Enqueues the calls of the sample of this number."""
        self.samples[number % len(self.samples)].run()

    def recheck(self) -> None:
        """Verifies what the timed calls themselves write: outputs poisoned, once more, compared. Raises WrongResult."""
        batches = self.samples[:RECHECKED]
        for batch in batches:
            batch.poison()
        for batch in batches:  # all of them before the first is compared: a rank that raises must not leave its peers in a call
            batch.run()
        for batch in batches:
            results = dict(zip(batch.seeds, batch.results, strict=True))
            for seed in list(results)[:RECHECKED]:
                self._check(seed, results[seed])

    def check_waits(self) -> None:
        """Waits for the device. Raises KernelTimeout if a wait inside a kernel gave up."""
        self.context.world.synchronize()
        if failure := self.operator.failure():
            raise KernelTimeout(failure)

    def check_error(self, found: float, where: str) -> None:
        """Notes the relative error of a result. Raises WrongResult if it is too great."""
        self.relative_error = max(self.relative_error, found)
        allowed = TOLERANCE[self.problem.out_dtype]
        if not found <= allowed:
            raise WrongResult(f"rank {self.context.rank}: relative error {found:.3g} {where}, allowed {allowed:g}")

    def _check(self, seed: int, result: Tensor) -> None:
        self.check_waits()
        self.check_error(relative_error(result, self.inputs.reference(seed)), f"on input set {seed}")
