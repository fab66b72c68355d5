"""The products that stand around calls in place: they read their weights from memory, as the layers of a model do."""

from __future__ import annotations

import math

import torch

GPU_ROWS, GPU_WIDTH = 16, 4096
"""A product of 17 us on an H100, most of it for 32 MiB of weights."""
CPU_ROWS, CPU_WIDTH = 8, 64
"""The stand-in of CPU ranks, some microseconds long."""
SEED = 48


class Surroundings:
    """The products of one rank. Their weights, of `nbytes` together at least, rotate, so that none is in the cache when it is
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
        self(0)  # libraries load their kernels now, and not while a graph is captured

    def __call__(self, number: int) -> None:
        """Enqueues the product before the call of this number, or after the last call."""
        torch.mm(self._x, self._weights[number % len(self._weights)].t(), out=self._out)
