"""A yardstick beside the samples: a fixed piece of local work, whose time tells how fast a rank's device is just now.

It communicates with nobody, so a rank that is slow, clocks that were lowered or a machine that is shared show in it and
cannot be taken for a property of a candidate. The least of its repeats is taken, which a passing disturbance leaves alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import reduce

import torch

from autotax.heap import World
from autotax.runner.calibration_readings import Reading

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
        """All is enqueued at once, behind a first product, so that the device never waits for the host."""
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
