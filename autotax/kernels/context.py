"""The services that a variant uses on its machine: ranks, heap, launches, collectives, streams.

All device work of an operator goes through `Context`. So a dry context can walk the same code and only compile: on the ranks
before the first run, because a rank must not compile while its peers spin, and for a GPU that is not in the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import REGISTERS, Hardware
from autotax.heap.base import Heap
from autotax.heap.world import World
from autotax.kernels.primitives import CONTROL_WORDS
from autotax.operators.inputs import DTYPES

# A poll takes about 1 us on a GPU. It takes about 300 us on a CPU rank, which pauses between polls. Both limits are about 4 s.
GPU_POLL_LIMIT = 1 << 22
INTERPRETER_POLL_LIMIT = 1 << 14


@dataclass(frozen=True)
class Compiled:
    """Bytes of shared memory, registers and spills of a compiled kernel; the last two are None until it is loaded."""

    kernel: str
    shared: int
    registers: int | None
    spills: int | None


def note_of(control: Tensor, rank: int) -> str | None:
    """Returns the note in a control block that a timed-out wait left, or None. Waits for the device."""
    error, source, index, goal, seen = control[4:9].tolist()
    return f"rank {rank} waited for flag {index} of rank {source}: needed {goal}, saw {seen}" if error else None


class Context:
    """The devices and services of one rank. `target` is "cuda", "hip" or "interpreter", the constexpr that kernels see."""

    def __init__(self, world: World, heap: Heap, hardware: Hardware, poll_limit: int | None = None) -> None:
        self.world = world
        self.heap = heap
        self.hardware = hardware
        self.target = hardware.target.split(":")[0]
        self.processors = hardware.processors
        self.poll_limit = poll_limit or (GPU_POLL_LIMIT if hardware.on_gpu else INTERPRETER_POLL_LIMIT)
        self.dry = False
        self.compiled: list[Compiled] = []

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def interpreted(self) -> bool:
        return self.target == "interpreter"

    def dtype(self, problem: Problem) -> torch.dtype:
        return DTYPES[problem.dtype]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates ordinary memory of this rank. The contents are unspecified."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.heap.slab.device)

    def flags(self, count: int) -> Tensor:
        """Allocates int32 [count] in the heap, all zero: no call has been signalled yet."""
        return self.heap.zeros((count,), torch.int32)

    def control(self, patience: int = 1) -> Tensor:
        """Allocates a control block (see `primitives`) at epoch 1. Waits give up after `patience` times the usual polls."""
        words = [1, 0, 0, patience * self.poll_limit] + [0] * (CONTROL_WORDS - 4)
        return torch.tensor(words, dtype=torch.int32, device=self.heap.slab.device)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Runs kernel[grid](*args, **options) with TARGET added. A dry context compiles and loads the kernel instead."""
        if not self.dry:
            kernel[grid](*args, TARGET=self.target, **options)
        elif not self.interpreted:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            if self.heap.slab.is_cuda:
                binary._init_handles()  # loads the kernel, so that too much shared memory raises here
            self.compiled.append(
                Compiled(kernel.__name__, binary.metadata.shared, getattr(binary, "n_regs", None), getattr(binary, "n_spills", None))
            )

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[list[Compiled]]:
        """Within it nothing is launched, moved or communicated; kernels are compiled and listed."""
        self.dry, self.compiled = True, []
        try:
            yield self.compiled
        finally:
            self.dry = False

    def all_gather(self, gathered: Tensor, shard: Tensor) -> None:
        """Runs the collective library's all-gather along the first dimension. It moves bytes, whatever the dtype."""
        if not self.dry:
            # torch 2.13 renamed the function and warns about the old name.
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            gather(gathered.view(-1).view(torch.uint8), shard.reshape(-1).view(torch.uint8), group=self.world.data)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Runs the collective library's all-to-all: part r of `sent`, of equal size in bytes, goes to rank r."""
        if not self.dry:
            dist.all_to_all_single(received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=self.world.data)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """out = a @ b.T through the vendor's library."""
        if not self.dry:
            torch.mm(a, b.t(), out=out)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copies in stream order, by the copy engine (GPU) or memcpy (CPU)."""
        if not self.dry:
            destination.copy_(source, non_blocking=True)

    def streams(self, count: int, *, urgent: bool = False) -> list[torch.cuda.Stream | None]:
        """Side streams, on CPU ranks None. With `urgent`, a large grid on the current stream does not delay their kernels."""
        if self.heap.slab.is_cuda:
            return [torch.cuda.Stream(self.heap.slab.device, priority=-1 if urgent else 0) for _ in range(count)]
        return [None] * count

    def beside(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        """Runs a block on a side stream, after everything enqueued so far."""
        if stream is None or self.dry:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def rejoin(self, streams: Sequence[torch.cuda.Stream | None]) -> None:
        """Makes the current stream wait for the side streams."""
        for stream in streams:
            if stream is not None and not self.dry:
                torch.cuda.current_stream().wait_stream(stream)


try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ModuleNotFoundError:  # Triton built only for ROCm: launches never overlap there, so this is never called

    @triton.jit
    def gdc_wait():
        pass

    gdc_launch_dependents = gdc_wait


def overlapping(hardware: Hardware) -> dict[str, Any]:
    """EARLY and the options of a launch that may begin while the kernel before it ends, where the hardware can do that."""
    early = hardware.launches_overlap
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})


def all_resident(context: Context) -> dict[str, Any]:
    """Options of a launch whose programs all run at the same time, so that they may wait for each other.

    The driver refuses it unless all programs fit. From Hopper on, the launch may begin while the previous kernel is ending.
    """
    if context.interpreted:
        return {}
    overlapping = {} if context.target == "hip" else {"launch_pdl": context.hardware.launches_overlap}
    return {"launch_cooperative_grid": True} | overlapping


def threads_of(context: Context, warps: int) -> int:
    """Threads of a program with `warps` warps; a warp is a wave of 64 threads on AMD."""
    return warps * (64 if context.target == "hip" else 32)


def together(context: Context, config: Config) -> dict[str, Any]:
    """Options of a launch whose programs all run at the same time, several on a processor if the config says so."""
    programs, warps = int(config["per_processor"]), int(config["num_warps"])
    few = {"maxnreg": REGISTERS // (programs * threads_of(context, warps))} if context.target == "cuda" and programs > 1 else {}
    return all_resident(context) | few
