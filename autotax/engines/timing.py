"""Times of functions of an engine and of ours, on the device alone.

A sample is no graph. Custom all-reduce of vLLM and SGLang registers the buffers that a graph reads only in the engine's own
capture, so a replay of another graph would read wild addresses. Calls are enqueued behind a sleep of the device instead, so that
their host work costs no time of the device. They run outside the engine's state of capture, in which its warm-up calls sum
nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autotax.heap.world import World
from autotax.nn import norm

CYCLES_PER_S = 2e9
"""Of the sleep of a GPU; a slower clock makes it longer."""
STATES = ("vllm.distributed.parallel_state", "sglang.srt.distributed.parallel_state")
"""Modules of engines with the group of tensor parallelism."""


@torch.no_grad()
def least_microseconds(world: World, device: torch.device, call: Callable[[], object]) -> float:
    """As in autotax.nn.norm, but on GPUs the least of several samples that are no graphs. Collective."""
    with outside_captures():
        return (_on_gpu if device.type == "cuda" else norm.least_microseconds)(world, device, call)


def _on_gpu(world: World, device: torch.device, call: Callable[[], object]) -> float:
    flush = torch.ones(torch.cuda.get_device_properties(device).L2_cache_size // 2, device=device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    least, host_s = math.inf, 0.0
    for number in range(norm.REPEATED + 2):  # two that warm up: the first may compile, the second shows the host's work
        world.synchronize()
        world.barrier()
        started = time.perf_counter()
        torch.cuda._sleep(int(2 * host_s * CYCLES_PER_S))
        for repeat in range(norm.REPEATED + 1):
            if repeat == 1:  # the ranks have met in the first call
                began.record()
            flush.sum()
            call()
        ended.record()
        host_s = min(host_s or math.inf, time.perf_counter() - started) if number else 0.0
        world.synchronize()
        if number > 1:
            least = min(least, began.elapsed_time(ended))
    return least / norm.REPEATED * 1e3


@contextmanager
def outside_captures() -> Iterator[None]:
    """Resets the state of capture of the engines' custom all-reduce."""
    groups = [getattr(sys.modules.get(path), "_TP", None) for path in STATES]
    holders: list[Any] = [getattr(group, "device_communicator", None) or group for group in groups]
    sums: list[Any] = [getattr(holder, "ca_comm", None) for holder in holders]
    capturing = [custom for custom in sums if getattr(custom, "_IS_CAPTURING", False)]
    for custom in capturing:
        custom._IS_CAPTURING = False
    try:
        yield
    finally:
        for custom in capturing:
            custom._IS_CAPTURING = True
