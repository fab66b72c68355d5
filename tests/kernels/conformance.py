"""What every variant must do, on CPU ranks and on GPUs alike: functions that run on all ranks (see tests/ranks.py)."""

from __future__ import annotations

import math

import torch

from autotax.config import Config
from autotax.hardware import detect
from autotax.heap import World, open_heap
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.keys import fix_cache_keys
from autotax.kernels.operator import Operator
from autotax.problem import Problem
from autotax.runner.reference import Inputs, make_inputs, reference, relative_error

HEAP_BYTES = 256 << 20
CPU_POLL_LIMIT = 1 << 17
"""On CPU ranks: more than usual, because a peer that shares its processor may take its time."""


def _ready(world: World, problem: Problem, config: Config) -> tuple[Context, Operator]:
    if world.device.type == "cuda":
        fix_cache_keys()  # so that kernels that were compiled ahead are found
    limit = CPU_POLL_LIMIT if world.backend == "cpu" else None
    context = Context(world, open_heap(world, HEAP_BYTES), detect(world.backend), limit)
    operator = prepare(problem, config, context)
    context.heap.check()
    with context.rehearsal():
        first = make_inputs(problem, 0, world.rank, world.device)
        operator(*first.tensors, first.out)
    world.barrier()
    return context, operator


def errors_of(world: World, problem: Problem, config: Config, calls: int) -> list[float]:
    """Relative error of each of several calls with different inputs through the same workspaces, outputs poisoned."""
    context, operator = _ready(world, problem, config)
    errors = []
    for seed in range(calls):
        call = make_inputs(problem, seed, world.rank, world.device)
        call.poison()
        operator(*call.tensors, call.out)
        world.synchronize()
        assert operator.failure() is None, operator.failure()
        errors.append(relative_error(call.out, reference(problem, seed, world.rank, world.device)))
    context.heap.close()
    return errors


def replay(world: World, problem: Problem, config: Config, replays: int, sets: int = 7) -> tuple[float, int]:
    """Captures three calls in a graph (an odd number: no inbox may rely on an even one) and replays it with changing inputs.

    Returns the worst relative error of the first pass over the input sets, and how many elements ever differed from it
    in `replays` replays (every variant is deterministic).
    """
    context, operator = _ready(world, problem, config)
    drawn = [make_inputs(problem, seed, world.rank, world.device) for seed in range(sets)]
    static = [make_inputs(problem, seed, world.rank, world.device) for seed in (0, 1, 2)]
    for call in static:
        operator(*call.tensors, call.out)
    world.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in static:
            operator(*call.tensors, call.out)

    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    worst, firsts = 0.0, {}
    for i in range(replays):
        chosen = [(3 * i + j) % sets for j in range(3)]
        for call, seed in zip(static, chosen, strict=True):
            _load(call, drawn[seed])
        graph.replay()
        for call, seed in zip(static, chosen, strict=True):
            if seed not in firsts:
                world.synchronize()
                assert operator.failure() is None, operator.failure()
                worst = max(worst, relative_error(call.out, reference(problem, seed, world.rank, world.device)))
                firsts[seed] = call.out.clone()
            wrong += (call.out != firsts[seed]).sum()
    world.synchronize()
    assert operator.failure() is None, operator.failure()
    world.barrier()
    context.heap.close()
    return worst, int(wrong)


def _load(call: Inputs, drawn: Inputs) -> None:
    for tensor, values in zip(call.tensors, drawn.tensors, strict=True):
        tensor.copy_(values)
    call.out.fill_(math.nan)
