"""Making operators ready on all ranks: memory for all of them at once, every kernel compiled before the first call."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware, symmetric_heap
from autotax.heap import Heap, HeapError, World, open_heap
from autotax.heap.triton_interpreter import CPU_POLLS_PER_S, patch_interpreter
from autotax.heap.world import together
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.offline import META, MetaHeap, fix_cache_keys
from autotax.nn.groups import wait_s

GPU_POLLS_PER_S = (1 << 29) / 600
"""The highest rate of polls; polls take longer when ranks share links."""
MOST_POLLS = (2**31 - 1) // 4
"""A kernel counts its polls in 31 bits, and some waits last four times as long as others (see Context.control)."""
SPECIALIZED = 16
"""Triton compiles a kernel anew for an integer that is 1, is a multiple of this, or neither."""

Requested = tuple[Problem, Config]


class NoHeap(Heap):
    """Stands in for a heap if no operator needs symmetric memory. It only holds the device of the workspaces."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.slab = torch.empty(0, dtype=torch.uint8, device=world.device)
        self.bases = torch.zeros(world.size, dtype=torch.int64, device=world.device)

    def peer_slab(self, rank: int) -> Tensor:
        raise HeapError(f"there is no symmetric memory, so none of rank {rank}")

    def close(self) -> None:
        pass


class Prepared:
    """Operators of one module, on one rank. Construction is collective and ends alike on all ranks.

    `operators` has one for each of `requested`, or None if it could not be made; `notes` give the reasons.
    """

    def __init__(
        self,
        world: World,
        hardware: Hardware,
        requested: Sequence[Requested],
        rehearse: Callable[[Problem], Iterable[tuple[Problem, tuple[Tensor, ...]]]],
    ) -> None:
        """`rehearse` gives, for the problem of an operator, problems that fit it and tensors for a call of each."""
        self.notes: list[str] = []
        needs, self.heap = self._open(world, hardware, requested)
        limit = min(int(wait_s() * (GPU_POLLS_PER_S if hardware.on_gpu else CPU_POLLS_PER_S)), MOST_POLLS)
        context = Context(world, self.heap, hardware, limit)
        if hardware.on_gpu:
            fix_cache_keys()
        else:
            patch_interpreter()
        # Without symmetric memory, operators that need none can still be made.
        possible = [need <= self.heap.size for need in needs]
        self.operators = [
            self._make(context, *pair, rehearse) if ok else None for ok, pair in zip(possible, requested, strict=True)
        ]

    def _open(self, world: World, hardware: Hardware, requested: Sequence[Requested]) -> tuple[list[int], Heap]:
        """The bytes that each operator takes, and a heap for all of them, or a NoHeap if symmetric memory is missing."""
        needs = [bytes_needed(world, hardware, *pair) for pair in requested]
        if not any(needs):
            return needs, NoHeap(world)
        try:
            require_reach(world)
            return needs, open_heap(world, sum(needs))
        except HeapError as error:
            self.notes.append(str(error))
            return needs, NoHeap(world)

    def _make(self, context: Context, problem: Problem, config: Config, rehearse: Callable[..., Any]) -> Kernel[Any] | None:
        world = context.world
        try:
            with together(world, f"prepare {config} for {problem.key}"):
                operator = prepare(problem, config, context)
            self.heap.check()
            with together(world, f"compile {config} for {problem.key}"), context.rehearsal():
                for smaller, tensors in rehearse(problem):
                    call = operator.fitted(smaller)
                    if call:
                        call(*tensors)
        except HeapError as error:
            self.notes.append(str(error))
            return None
        return operator


def require_reach(world: World) -> None:
    """Raises HeapError on all ranks if their backend has no symmetric memory for this group, before a rank waits for others."""
    hosts = world.gather(socket.gethostname(), str)
    if len(set(hosts)) > 1:
        raise HeapError(f"the ranks are on several hosts ({', '.join(sorted(set(hosts)))}); symmetric memory needs one")
    if world.backend != "cpu" and symmetric_heap(world.backend) == "iris" and world.size != dist.get_world_size():
        raise HeapError(f"the group has {world.size} of the job's {dist.get_world_size()} ranks; Iris needs all of them")


def bytes_needed(world: World, hardware: Hardware, problem: Problem, config: Config) -> int:
    """Bytes that an operator takes from the heap, found by making it without memory."""
    heap = MetaHeap(World(world.rank, world.size, world.backend, META, world.data, world.control, None), 1 << 48)
    prepare(problem, config, Context(heap.world, heap, hardware))
    return heap.used


def special(value: int) -> int:
    """The class of an integer argument for Triton, which compiles one kernel for each class."""
    return value if value == 1 else min(value % SPECIALIZED, 1) * 2


def one_of_each_kind(values: Iterator[int], kind: Callable[[int], object]) -> list[int]:
    """The first value of each kind."""
    firsts: dict[object, int] = {}
    for value in values:
        firsts.setdefault(kind(value), value)
    return list(firsts.values())
