"""The inputs and references of one problem on one rank, drawn once and kept for all its trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels.kernel import Kernel
from autotax.operators.inputs import Call
from autotax.operators.verification import Expected, make_inputs, reference
from autotax.runner.measurement import Candidate, Effort

MOST_SETS = 32
CACHE_FACTOR = 3
"""The rotating inputs take this many times the largest cache, so that no call finds its inputs in the cache."""
VERIFIED = (0, 1)
SOAKED = (0, 1, 2, 3)
"""Input sets that a soak alternates between. The last one is used only if sets are small compared with the memory."""


class InputCache:
    """Input sets by seed. Sets of even seeds are timed (normal numbers, full lengths). Sets of odd seeds are ragged and have
    outliers.
    """

    def __init__(self, problem: Problem, rank: int, device: torch.device, hardware: Hardware) -> None:
        self.problem = problem
        self.rank = rank
        self.device = device
        self.hardware = hardware
        self._sets: dict[int, Call] = {}
        self._references: dict[int, Expected] = {}
        nbytes = self.get(0).nbytes
        copies = math.ceil(CACHE_FACTOR * hardware.cache_bytes / nbytes) if hardware.on_gpu else 2
        self.rotation = [2 * i for i in range(min(MOST_SETS, max(2, copies)))]
        """Seeds of the sets that timed calls rotate through when they must not find their inputs in the L2."""
        self.soaked = SOAKED if nbytes < (hardware.memory_gib << 30) / 32 else SOAKED[:-1]

    def draw(self, candidates: Sequence[Candidate], effort: Effort) -> None:
        """Draws all input sets that the candidates need, so that a lack of memory shows now, in the report of every rank."""
        if any(candidate.conditions.in_place for candidate in candidates):
            self.surroundings  # noqa: B018
        timed = {seed for candidate in candidates for seed in self.timed(candidate.conditions)}
        soaked = self.soaked if effort.soak else ()
        for seed in sorted({*VERIFIED, *timed, *soaked}):
            self.get(seed)
        for seed in sorted({*VERIFIED, *sorted(timed)[:2], *soaked}):
            self.reference(seed)

    @cached_property
    def surroundings(self) -> Surroundings:
        """The products around calls in place."""
        return Surroundings(self.device, CACHE_FACTOR * self.hardware.cache_bytes)

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


# Batches of calls, captured in one CUDA graph and replayed, or launched one by one. Calls are alone or between products.

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


# The products around calls in place. They read their weights from memory, as the layers of a model do.

GPU_ROWS, GPU_WIDTH = 16, 4096
"""A product of 17 us on an H100, most of it for 32 MiB of weights."""
CPU_ROWS, CPU_WIDTH = 8, 64
"""The product of CPU ranks, which takes some microseconds."""
SEED = 48


class Surroundings:
    """The products of one rank. Their weights take at least `nbytes` together and rotate, so that none is in the cache when it is
    read. Their results are not read, and a product waits for no other rank.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        on_gpu = device.type == "cuda"
        rows, width = (GPU_ROWS, GPU_WIDTH) if on_gpu else (CPU_ROWS, CPU_WIDTH)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        generator = torch.Generator(device).manual_seed(SEED)
        self._x = torch.randn(rows, width, device=device, dtype=dtype, generator=generator)
        count = max(2, math.ceil(nbytes / (width * width * dtype.itemsize)))
        scale = width**-0.5
        self._weights = [
            torch.randn(width, width, device=device, dtype=dtype, generator=generator).mul_(scale) for _ in range(count)
        ]
        self._out = torch.empty_like(self._x)
        self(0)  # makes libraries load their kernels now and not during graph capture

    def __call__(self, number: int) -> None:
        """Enqueues the product before the call of this number, or after the last call."""
        torch.mm(self._x, self._weights[number % len(self._weights)].t(), out=self._out)


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
