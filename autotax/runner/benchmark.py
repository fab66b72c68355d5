"""One candidate on one rank: its inputs, batches of calls, and one method for each stage.

Stages raise errors. `rank_worker.Stages` catches them and lets all ranks agree on the outcome before the next stage.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels import prepare
from autotax.kernels.alignment import delay
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.operators import registry
from autotax.operators.inputs import Call
from autotax.operators.verification import Expected, farthest, make_inputs, reference, relative_error, tolerance
from autotax.runner.measurement import REFERENCES, Candidate, Effort, RankReport
from autotax.runner.surroundings import ReduceScatter, Surroundings

# The inputs and references of one problem on one rank, drawn once and kept for all its trials.

MOST_SETS = 32
CACHE_FACTOR = 3
"""The rotating inputs take this many times the largest cache, so that no call finds its inputs in the cache."""
VERIFIED = (0, 1)
SOAKED = tuple(range(REFERENCES))
"""Input sets that a soak alternates between. The last one is used only if sets are small compared with the memory."""


class InputCache:
    """Input sets by seed: even ones are timed (normal numbers, full lengths), odd ones are ragged and have outliers."""

    def __init__(
        self, problem: Problem, rank: int, device: torch.device, hardware: Hardware, reduce_scatter: ReduceScatter | None = None
    ) -> None:
        self.problem = problem
        self.rank = rank
        self.device = device
        self.hardware = hardware
        self._reduce_scatter = reduce_scatter
        self._sets: dict[int, Call] = {}
        self._references: dict[int, Expected] = {}
        nbytes = self.get(0).nbytes
        copies = math.ceil(CACHE_FACTOR * hardware.cache_bytes / nbytes) if hardware.on_gpu else 2
        self.rotation = [2 * i for i in range(min(MOST_SETS, max(2, copies)))]
        """Seeds of the sets that timed calls rotate through when they must not find their inputs in the L2."""
        self.soaked = SOAKED if nbytes < (hardware.memory_gib << 30) / 32 else SOAKED[:-1]

    def draw(self, candidates: Sequence[Candidate], effort: Effort, tell: Callable[[str], None]) -> None:
        """Draws all input sets that the candidates need, so that a lack of memory shows now, in the report of every rank.

        `tell` is called before each reference. That of attention over 128 K tokens takes a quarter of a minute.
        """
        if any(candidate.conditions.in_place for candidate in candidates):
            self.surroundings  # noqa: B018
        timed = {seed for candidate in candidates for seed in self.timed(candidate.conditions)}
        soaked = self.soaked if effort.soak else ()
        for seed in sorted({*VERIFIED, *timed, *soaked}):
            self.get(seed)
        missing = sorted({*VERIFIED, *sorted(timed)[:2], *soaked} - self._references.keys())
        for seed in missing:
            tell(f"reference of input set {seed}")
            self.reference(seed)
        if missing and self.device.type == "cuda":
            torch.cuda.empty_cache()  # graphs have memory of their own, and cannot take what torch keeps for eager work

    @cached_property
    def surroundings(self) -> Surroundings:
        """The work around calls in place, which for some operators needs a reduce-scatter."""
        summed = self._reduce_scatter if registry.of(self.problem).behind == "norm" else None
        return Surroundings(self.device, CACHE_FACTOR * self.hardware.cache_bytes, summed, self.problem.world_size)

    def timed(self, conditions: Conditions) -> list[int]:
        """Seeds of the sets that timed calls take in turn."""
        return self.rotation if conditions.l2 == "cold" else [0]

    def get(self, seed: int) -> Call:
        if seed not in self._sets:
            self._sets[seed] = make_inputs(self.problem, seed, self.rank, self.device)
        return self._sets[seed]

    def reference(self, seed: int) -> Expected:
        if seed not in self._references:
            self._references[seed] = reference(self.problem, seed, self.rank, self.device)
        return self._references[seed]


# Batches of calls, captured in one CUDA graph and replayed, or launched one by one. Calls are alone or in place.

class Batch:
    """One call for each of `seeds`, in order. With `graph` construction captures them; nothing runs before `run`.

    `around(number)` enqueues the work before the call of that number, and after the last call. Without an operator there is only
    this work.
    """

    def __init__(
        self,
        operator: Kernel | None,
        inputs: InputCache,
        seeds: Sequence[int],
        graph: bool,
        around: Callable[[int], None] | None = None,
    ) -> None:
        self.operator = operator
        self._around = around
        self.seeds = tuple(seeds)
        self.calls = [inputs.get(seed) for seed in seeds]
        self.results: list[Tensor] = []
        """The result tensor of each call, known after capture or the first run."""
        self._graph = self._captured() if graph else None

    def poison(self) -> None:
        """Fills the outputs with NaN, so that unwritten elements are noticed."""
        outputs = [*(output for call in self.calls for output in call.outputs), *self.results]
        for output in {output.data_ptr(): output for output in outputs}.values():
            output.fill_(math.nan)

    def run(self) -> None:
        """Enqueues all calls."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._call_all()

    def _call_all(self) -> None:
        results = []
        for number, call in enumerate(self.calls):
            if self._around:
                self._around(number)
            if self.operator:
                results.append((call.out, self.operator(*call.tensors, call.out)))
        if self._around:
            self._around(len(self.calls))
        self.results = [out if result is None else result for out, result in results]

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


# Samples of one kind: the batches that the samples use in turn, and the time of each sample on this rank.

LEAD_BELOW_US = 5000.0
"""A sample shorter than this has a lead. After some milliseconds of idling a replay takes 30 to 60 us longer."""


class Series:
    """`us` holds the microseconds of whole samples on this rank. `typical_us` is the time of a sample on the slowest rank, at
    first an estimate. It is equal on all ranks.
    """

    def __init__(self, batches: Sequence[Batch], *, captured: bool, estimate_us: float) -> None:
        self.batches = batches
        self.captured = captured
        self.lead = estimate_us < LEAD_BELOW_US
        """Whether the device runs the batch once before the timed run, so that the previous work has no influence."""
        self.us: list[float] = []
        self.typical_us = estimate_us

    @property
    def calls(self) -> int:
        """Calls of one sample, or places of calls."""
        return len(self.batches[0].calls)

    def run(self, number: int) -> None:
        """Enqueues the sample of this number."""
        self.batches[number % len(self.batches)].run()


# The stages of a candidate: prepare, compile, verify, capture and sample.

LEAST_CALLS = {1e3: 10, 2e4: 4}
"""Least calls of a sample if a call takes less than so many microseconds; else 1. Rotating inputs and short graphs need more."""
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
        """The series to time: the calls, and in place also the work around them alone and the calls back to back."""

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
        """Runs the calls that will be timed, one by one. Returns a first estimate of microseconds a call. Collective."""
        if self.candidate.conditions.in_place:
            self.inputs.surroundings(0)  # the collective library connects the ranks now and not during graph capture
        batch = Batch(self.operator, self.inputs, self.seeds, graph=False)
        batch.run()
        self.context.world.synchronize()
        started = time.perf_counter()
        batch.run()
        self.context.world.synchronize()
        return (time.perf_counter() - started) / len(self.seeds) * 1e6

    def least_calls(self, call_us: float) -> int:
        """The least number of calls of a sample if one call takes `call_us`, for graphs and eager calls alike."""
        return next((calls for below, calls in LEAST_CALLS.items() if call_us < below), 1)

    def capture(self, calls: int, call_us: float) -> None:
        """Sets the calls of a sample, at least `calls`, and captures them. `call_us` is one call's time, equal on all ranks."""
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
    def lengthens_samples(self) -> bool:
        """Whether a sample gets so many calls that the cost of its start is negligible."""
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
        allowed = tolerance(self.problem)
        if not error <= allowed:
            raise WrongResult(f"rank {self.context.rank}: relative error {error:.3g} {where}, allowed {allowed:g}")

    def _check(self, seed: int, result: Tensor) -> None:
        self.check_waits()
        reference, call = self.inputs.reference(seed), self.inputs.get(seed)
        if result.shape != reference.right.shape:
            shapes = f"of shape {list(result.shape)}, its reference {list(reference.right.shape)}"
            raise WrongResult(f"rank {self.context.rank}: the result is {shapes}")
        self.check_error(relative_error(result, reference, call), f"on input set {seed}")


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


# One candidate on one rank, from its first stage to its report.

@dataclass(frozen=True)
class Outcome:
    """How a stage went: the gravest status of all ranks, the cause if this rank met it, its seconds, and each rank's figure."""

    status: str
    error: str | None
    seconds: float
    values: tuple[float, ...]


@dataclass(eq=False)
class Trial:
    """`status` and `readings` are equal on all ranks. `error`, `samples` and seconds are those of this rank."""

    bench: Bench
    status: str = "ok"
    error: str | None = None
    estimate_us: float = 0.0
    samples: list[float] = field(default_factory=list)
    given_up: bool = False
    remeasured: int = 0
    soaked: int = 0
    readings: dict[str, float] = field(default_factory=dict)
    device_s: float = 0.0

    @property
    def alive(self) -> bool:
        return self.status == "ok"

    def take(self, outcome: Outcome, on_device: bool = True) -> None:
        """Adds the outcome of a stage to this trial; `on_device` says whether the stage works on the device."""
        self.status, self.error = outcome.status, outcome.error
        if on_device:
            self.device_s += outcome.seconds

    def report(self) -> RankReport:
        return RankReport(
            status="pruned" if self.alive and self.given_up else self.status,
            error=self.error,
            samples=tuple(self.samples) if self.alive else (),
            compile_s=self.bench.compile_s,
            relative_error=self.bench.relative_error if self.status in ("ok", "wrong_result") else None,
            device_s=self.device_s,
            remeasured=self.remeasured,
            soaked=self.soaked,
            readings=self.readings,
        )
