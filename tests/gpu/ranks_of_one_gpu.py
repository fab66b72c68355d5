"""Several ranks on one GPU: each has a share of its processors, a slab and a stream. The links are its memory.

The variants really exchange data between ranks, and the ranks run at different speeds. So one GPU suffices to prove protocols,
but not to measure links. One process holds all ranks: there is no collective library.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware, detect
from autotax.heap.base import Heap
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.operators.inputs import Call
from autotax.operators.problems import AllGatherGemm
from autotax.operators.verification import make_inputs, reference, relative_error
from tests.conformance.calls import differing

HEAP_BYTES = 256 << 20
POLLS = 100_000
"""Polls before a rank gives up waiting for a peer that never calls: some 0.1 s."""
MOST_DELAY = 200_000
"""The most clock cycles by which a rank is late: some 0.1 ms."""


class SlabOfMany(Heap):
    """The slab of one rank. All ranks share the address space, so any rank can address every slab."""

    def __init__(self, world: World, slabs: list[torch.Tensor]) -> None:
        super().__init__(world)
        self.slabs = slabs
        self.slab = slabs[world.rank]
        self.bases = torch.tensor([slab.data_ptr() for slab in slabs], dtype=torch.int64, device=world.device)

    def peer_slab(self, rank: int) -> torch.Tensor:
        return self.slabs[rank]

    def close(self) -> None:
        pass


def share_of(world_size: int) -> Hardware:
    """The GPU as each of several ranks sees it."""
    hardware = detect()
    return replace(hardware, processors=hardware.processors // world_size)


class Rank:
    """One rank's operator, inputs and graph of three calls (an odd number: no inbox may rely on an even one)."""

    def __init__(
        self, problem: Problem, config: Config, rank: int, slabs: list[torch.Tensor], hardware: Hardware, polls: int | None = None
    ) -> None:
        device = torch.device("cuda", 0)
        nobody: Any = None
        self.world = World(rank, len(slabs), "cuda", device, nobody, nobody, None)
        self.context = Context(self.world, SlabOfMany(self.world, slabs), hardware, polls)
        self.operator = prepare(problem, config, self.context)
        self.stream = torch.cuda.Stream(device)
        self.calls = [make_inputs(problem, seed, rank, device) for seed in (0, 1, 2)]
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.firsts: dict[int, torch.Tensor] = {}
        with self.context.rehearsal():
            self.run()
        self.warm_up()

    def run(self) -> None:
        for call in self.calls:
            self.operator(*call.tensors, call.out)

    def warm_up(self) -> None:
        """Makes the allocations and loads the kernels of a comparison now. Later they could deadlock with waiting ranks."""
        with torch.cuda.stream(self.stream):
            self.load(self.calls)
            self.compare([0, 1, 2])
            self.compare([0, 1, 2])
            torch.cuda._sleep(1)
        self.stream.synchronize()
        self.firsts.clear()
        self.wrong.zero_()

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.run()

    def load(self, drawn: list[Call]) -> None:
        for call, new in zip(self.calls, drawn, strict=True):
            for tensor, values in zip(call.tensors, new.tensors, strict=True):
                tensor.copy_(values)
            call.out.fill_(math.nan)

    def compare(self, seeds: list[int]) -> None:
        """Counts elements that differ from the first result of the same inputs (every variant is deterministic)."""
        for call, seed in zip(self.calls, seeds, strict=True):
            if seed not in self.firsts:
                self.firsts[seed] = call.out.clone()
            self.wrong += differing(call.out, self.firsts[seed])


def replay(problem: Problem, config: Config, replays: int, sets: int = 7) -> tuple[float, int]:
    """Every rank replays its graph with changing inputs and a different delay each time.

    Returns the worst relative error of the first results, and the number of elements that ever differed from these.
    """
    hardware = share_of(problem.world_size)
    slabs = [torch.zeros(HEAP_BYTES, dtype=torch.uint8, device="cuda") for _ in range(problem.world_size)]
    ranks = [Rank(problem, config, rank, slabs, hardware) for rank in range(problem.world_size)]
    drawn = [[make_inputs(problem, seed, rank, slabs[0].device) for seed in range(sets)] for rank in range(len(ranks))]
    torch.cuda.synchronize()
    for rank in ranks:  # a first call outside a graph: all of it is enqueued before anything must be there
        with torch.cuda.stream(rank.stream):
            rank.run()
    torch.cuda.synchronize()
    for rank in ranks:
        rank.capture()
    late = random.Random(0)
    for turn in range(replays):
        seeds = [(3 * turn + at) % sets for at in range(3)]
        for rank, own in zip(ranks, drawn, strict=True):
            with torch.cuda.stream(rank.stream):
                rank.load([own[seed] for seed in seeds])
                torch.cuda._sleep(late.randrange(MOST_DELAY))
                rank.graph.replay()
                rank.compare(seeds)
    torch.cuda.synchronize()
    failures = [failure for rank in ranks if (failure := rank.operator.failure())]
    assert not failures, "; ".join(failures)
    worst = max(
        relative_error(out, reference(problem, seed, rank.world.rank, rank.world.device))
        for rank in ranks
        for seed, out in rank.firsts.items()
    )
    return worst, sum(int(rank.wrong) for rank in ranks)


def mix(problem: AllGatherGemm, config: Config, sizes: Sequence[int], turns: int) -> float:
    """Every rank makes calls of these numbers of rows in turn, each with a different delay. Returns the worst relative error."""
    return mix_of(problem, config, [replace(problem, m=rows * problem.world_size) for rows in sizes], turns)


def mix_of(problem: Problem, config: Config, smaller: Sequence[Problem], turns: int) -> float:
    """The same with calls of problems that the kernel of a larger one is fitted to."""
    hardware, world = share_of(problem.world_size), problem.world_size
    slabs = [torch.zeros(HEAP_BYTES, dtype=torch.uint8, device="cuda") for _ in range(world)]
    ranks = [Rank(problem, config, rank, slabs, hardware) for rank in range(world)]
    calls: list[dict[Problem, Any]] = []
    for rank in ranks:
        calls.append({size: rank.operator.fitted(size) for size in smaller})
        with rank.context.rehearsal():
            for size, call in calls[-1].items():
                first = make_inputs(size, 0, rank.world.rank, slabs[0].device)
                call(*first.tensors, first.out)
    late, worst = random.Random(0), 0.0
    for turn in range(turns):
        now = smaller[turn % len(smaller)]
        inputs = [make_inputs(now, turn % 3, rank, slabs[0].device) for rank in range(world)]
        for operands in inputs:
            operands.poison()
        torch.cuda.synchronize()
        for rank, own in zip(ranks, inputs, strict=True):
            with torch.cuda.stream(rank.stream):
                torch.cuda._sleep(late.randrange(MOST_DELAY))
                calls[rank.world.rank][now](*own.tensors, own.out)
        torch.cuda.synchronize()
        assert not any(rank.operator.failure() for rank in ranks)
        errors = [
            relative_error(own.out, reference(now, turn % 3, rank, own.out.device), own) for rank, own in enumerate(inputs)
        ]
        worst = max(worst, *errors)
    return worst


def differences(problem: Problem, config: Config, replays: int) -> int:
    """Counts elements of a replicated output in which a rank differs from rank 0, over `replays` replays with late ranks."""
    slabs = [torch.zeros(HEAP_BYTES, dtype=torch.uint8, device="cuda") for _ in range(problem.world_size)]
    ranks = [Rank(problem, config, rank, slabs, share_of(problem.world_size)) for rank in range(problem.world_size)]
    torch.cuda.synchronize()
    for rank in ranks:
        rank.capture()
    late, count = random.Random(0), 0
    for _ in range(replays):
        for rank in ranks:
            with torch.cuda.stream(rank.stream):
                torch.cuda._sleep(late.randrange(MOST_DELAY))
                rank.graph.replay()
        torch.cuda.synchronize()
        assert not any(rank.operator.failure() for rank in ranks)
        count += sum(int(differing(a.out, b.out)) for rank in ranks[1:] for a, b in zip(rank.calls, ranks[0].calls, strict=True))
    return count


def of_minus_zeros(problem: AllGatherGemm, config: Config, replays: int) -> int:
    """Elements of C that are no zeros where every rank's A is -0.0 throughout, over so many replays."""
    slabs = [torch.zeros(HEAP_BYTES, dtype=torch.uint8, device="cuda") for _ in range(problem.world_size)]
    ranks = [Rank(problem, config, rank, slabs, share_of(problem.world_size)) for rank in range(problem.world_size)]
    for rank in ranks:
        for call in rank.calls:
            call.tensors[0].fill_(-0.0)
    torch.cuda.synchronize()
    for rank in ranks:
        rank.capture()
    wrong = 0
    for _ in range(replays):
        for rank in ranks:
            for call in rank.calls:
                call.poison()
        torch.cuda.synchronize()
        for rank in ranks:
            with torch.cuda.stream(rank.stream):
                rank.graph.replay()
        torch.cuda.synchronize()
        assert not any(rank.operator.failure() for rank in ranks)
        wrong += sum(int((call.out != 0).sum()) for rank in ranks for call in rank.calls)
    return wrong


def without(missing: int, problem: Problem, config: Config) -> list[str | None]:
    """Rank `missing` never calls; returns the errors of the other ranks."""
    slabs = [torch.zeros(HEAP_BYTES, dtype=torch.uint8, device="cuda") for _ in range(problem.world_size)]
    hardware = share_of(problem.world_size)
    ranks = [Rank(problem, config, rank, slabs, hardware, POLLS) for rank in range(problem.world_size)]
    torch.cuda.synchronize()
    for rank in ranks:
        if rank.world.rank != missing:
            with torch.cuda.stream(rank.stream):
                rank.operator(*rank.calls[0].tensors, rank.calls[0].out)
    torch.cuda.synchronize()
    return [rank.operator.failure() for rank in ranks if rank.world.rank != missing]
