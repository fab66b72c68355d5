"""What every variant must do, on CPU ranks and on GPUs alike: functions that run on all ranks (see `autotax.testing.ranks`)."""

from __future__ import annotations

import hashlib
import math
import random
import time

import torch

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap import World, open_heap
from autotax.heap.triton_interpreter import CPU_POLL_LIMIT
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.keys import fix_cache_keys
from autotax.operators.inputs import Call, make_inputs, reference
from autotax.operators.verification import relative_error

HEAP_BYTES = 256 << 20


def _ready(world: World, problem: Problem, config: Config) -> tuple[Context, Kernel]:
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
            wrong += differing(call.out, firsts[seed])
    world.synchronize()
    assert operator.failure() is None, operator.failure()
    world.barrier()
    context.heap.close()
    return worst, int(wrong)


def differing(out: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """How many elements differ; a NaN does not differ from a NaN."""
    return ((out != first) & ~(out.isnan() & first.isnan())).sum()


def _load(call: Call, drawn: Call) -> None:
    for tensor, values in zip(call.tensors, drawn.tensors, strict=True):
        tensor.copy_(values)
    call.out.fill_(math.nan)


def bits_of(world: World, problem: Problem, config: Config, calls: int, most_delay: float = 0.02) -> list[str]:
    """Digests of what calls with equal inputs write, other inputs between them; ranks are late by other times each time."""
    context, operator = _ready(world, problem, config)
    late = random.Random(world.rank)
    digests = []
    for number in range(2 * calls):
        call = make_inputs(problem, 0 if number % 2 == 0 else number, world.rank, world.device)
        call.poison()
        time.sleep(late.uniform(0, most_delay))
        operator(*call.tensors, call.out)
        world.synchronize()
        assert operator.failure() is None, operator.failure()
        if number % 2 == 0:
            digests.append(hashlib.sha256(call.out.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16])
    context.heap.close()
    return digests


def errors_of_sizes(world: World, problem: Problem, config: Config, smaller: list[Problem]) -> list[float]:
    """As `errors_of`, one call each of problems that the kernel of a larger one is fitted to."""
    context, operator = _ready(world, problem, config)
    errors = []
    for seed, each in enumerate(smaller):
        fitted = operator.fitted(each)
        assert fitted is not None, each
        call = make_inputs(each, seed, world.rank, world.device)
        call.poison()
        fitted(*call.tensors, call.out)
        world.synchronize()
        assert fitted.failure() is None, fitted.failure()
        errors.append(relative_error(call.out, reference(each, seed, world.rank, world.device)))
    context.heap.close()
    return errors


def note_without(world: World, problem: Problem, config: Config, missing: int, polls: int) -> str | None:
    """What a rank says whose peer `missing` never calls."""
    context = Context(world, open_heap(world, HEAP_BYTES), detect(world.backend), polls)
    operator = prepare(problem, config, context)
    context.heap.check()
    call = make_inputs(problem, 0, world.rank, world.device)
    if world.rank != missing:
        operator(*call.tensors, call.out)
    world.synchronize()
    world.barrier()
    note = operator.failure()
    context.heap.close()
    return note
