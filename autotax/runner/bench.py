"""One candidate on one rank: prepared, compiled, verified, captured and sampled. Each stage is one method.

Stages raise; `session` catches, and lets all ranks agree on the outcome before the next stage.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.problem import Problem
from autotax.runner.inputs import InputCache
from autotax.runner.measurement import Candidate
from autotax.runner.reference import TOLERANCE, Inputs, relative_error

MODEST_CALLS = 10
"""Calls a graph captures, unless rotating the inputs takes more; fewer when calls are long."""
LONG_CALL_US = 1000.0


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
        self.compile_s = 0.0
        self.relative_error = 0.0
        self.calls: list[Inputs] = []
        self.results: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

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
        call = self.inputs.get(seed)
        call.poison()
        self._check(seed, self._call(call))

    def rehearse_timing(self) -> float:
        """Chooses the calls of one sample. Returns a first estimate of microseconds a call."""
        self.calls = [self.inputs.get(seed) for seed in self.inputs.rotation]
        self._call_all()
        self.context.world.synchronize()
        started = time.perf_counter()
        self._call_all()
        self.context.world.synchronize()
        return (time.perf_counter() - started) / len(self.calls) * 1e6

    def capture(self, estimate_us: float) -> None:
        """Fixes the calls of one sample, and captures them in a graph if the candidate is to be measured so."""
        if not self.context.heap.slab.is_cuda:
            self.calls = self.calls[:1]
            return
        wanted = max(len(self.calls), MODEST_CALLS) if estimate_us < LONG_CALL_US else max(len(self.calls), 4)
        self.calls = (self.calls * math.ceil(wanted / len(self.calls)))[: math.ceil(wanted / len(self.calls)) * len(self.calls)]
        if self.candidate.conditions.mode == "graph":
            self.graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """All calls in one graph. Not through torch.cuda.graph, which collects garbage and empties caches every time."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._call_all()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def run(self) -> None:
        """Enqueues one sample: all its calls."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._call_all()

    def recheck(self) -> None:
        """Verifies what the timed calls themselves write: outputs poisoned, one more sample, compared. Raises WrongResult."""
        for result in self.results:
            result.fill_(math.nan)
        self.run()
        for seed in self.inputs.rotation[:2]:
            for call, result in zip(self.calls, self.results, strict=True):
                if call is self.inputs.get(seed):
                    self._check(seed, result)

    def _call(self, call: Inputs) -> Tensor:
        """Enqueues one call; where its result will be."""
        result = self.operator(*call.tensors, call.out)
        return call.out if result is None else result

    def _call_all(self) -> None:
        self.results = [self._call(call) for call in self.calls]

    def _check(self, seed: int, result: Tensor) -> None:
        """Compares the result of a seed with its reference, and asks the kernels whether a wait gave up."""
        self.context.world.synchronize()
        if failure := self.operator.failure():
            raise KernelTimeout(failure)
        found = relative_error(result, self.inputs.reference(seed))
        self.relative_error = max(self.relative_error, found)
        allowed = TOLERANCE[self.problem.dtype]
        if not found <= allowed:
            raise WrongResult(f"rank {self.context.rank}: relative error {found:.3g} on input set {seed}, allowed {allowed:g}")
