"""The work around calls in place: products that read their weights from memory, as the layers of a model do."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

GPU_ROWS, GPU_WIDTH = 16, 4096
"""A product of 17 us on an H100, most of it for 32 MiB of weights."""
CPU_ROWS, CPU_WIDTH = 8, 64
"""The product of CPU ranks, which takes some microseconds."""
SEED = 48

ReduceScatter = Callable[[Tensor, Tensor], None]
"""`function(own, partial)` stores this rank's rows of the sum of all ranks' `partial` in `own`. Collective."""


class Surroundings:
    """The work of one rank around calls. Its results are not read.

    It is a product. The weights of all products take at least `nbytes` together and rotate, so that none is in the cache when it
    is read.

    With `reduce_scatter` the collective library's reduce-scatter and a norm follow the product, as they precede the all-gather of
    a layer with sequence parallelism. Their few rows have the same number on each of `world_size` ranks. Then there are
    six weights of half of `nbytes` each. Such a product evicts the library from the cache, as a model's products do. Otherwise
    the reduce-scatter would be faster without the calls, and the calls would be charged for that. Two weights were too few: an L2
    that does not evict its oldest lines kept parts of them.
    """

    def __init__(
        self, device: torch.device, nbytes: int, reduce_scatter: ReduceScatter | None = None, world_size: int = 1
    ) -> None:
        on_gpu = device.type == "cuda"
        rows, width = (GPU_ROWS, GPU_WIDTH) if on_gpu else (CPU_ROWS, CPU_WIDTH)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        generator = torch.Generator(device).manual_seed(SEED)
        self._x = torch.randn(rows, width, device=device, dtype=dtype, generator=generator)
        squares = nbytes / (width * width * dtype.itemsize)
        if reduce_scatter:
            columns, count = width * max(1, math.ceil(squares / 2)), 6
        else:
            columns, count = width, max(2, math.ceil(squares))
        scale = width**-0.5
        self._weights = [
            torch.randn(columns, width, device=device, dtype=dtype, generator=generator).mul_(scale) for _ in range(count)
        ]
        self._out = self._x.new_empty(rows, columns)
        self._reduce_scatter = reduce_scatter
        self._own = self._x.new_ones(math.ceil(rows / world_size), width)
        self._partial = self._own.repeat(world_size, 1)
        # Libraries load their kernels now and not during graph capture. Nothing collective: the ranks have not agreed yet.
        self._multiply(0)
        if reduce_scatter:
            self._normalise()

    def __call__(self, number: int) -> None:
        """Enqueues the work before the call of this number, or after the last call. Collective with a reduce-scatter."""
        self._multiply(number)
        if self._reduce_scatter:
            self._reduce_scatter(self._own, self._partial)
            self._normalise()

    def _multiply(self, number: int) -> None:
        torch.mm(self._x, self._weights[number % len(self._weights)].t(), out=self._out)

    def _normalise(self) -> None:
        torch.nn.functional.rms_norm(self._own, self._own.shape[1:])
