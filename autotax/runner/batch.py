"""Calls that are made together: captured in one CUDA graph and replayed, or made one by one; alone, or between products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autotax.kernels.kernel import Kernel
from autotax.runner.inputs import InputCache


class Batch:
    """One call for each of `seeds`, in order. With `graph` construction captures them; nothing runs before `run`.

    `around(number)` enqueues what stands before the call of that number, and after the last. Without an operator that is all.
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
        """Where the result of each call is; known once they were captured or run."""
        self._graph = self._captured() if graph else None

    def poison(self) -> None:
        """Fills the outputs with NaN, so that an element nobody writes is noticed."""
        outputs = [*(call.out for call in self.calls), *self.results]
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
