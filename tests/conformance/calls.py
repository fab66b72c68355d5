"""Functions that run the kernels of a config on all ranks (see `autotax.runner.ranks`) of CPUs or GPUs, and check results."""

from __future__ import annotations

import hashlib
import math
import random
import time

import torch

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels import prepare
from autotax.operators.inputs import Call
from autotax.operators.scaled import numbers
from autotax.operators.verification import make_inputs, reference, relative_error
from autotax.runner.rank_worker import open_context
from autotax.testing.operators import HEAP_BYTES, errors_of, output_of, ready

__all__ = [
    "HEAP_BYTES", "bits_of", "differing", "error_of_one_sign", "errors_of", "errors_of_sizes", "note_without", "ready", "replay",
]  # fmt: skip


def replay(world: World, problem: Problem, config: Config, replays: int, sets: int = 7) -> tuple[float, int]:
    """Captures three calls in a graph (an odd number: no inbox may rely on an even one) and replays it with changing inputs.

    Returns the worst relative error of the first pass over the input sets, and how many elements ever differed from it
    in `replays` replays (every variant is deterministic).
    """
    context, operator = ready(world, problem, config)
    drawn = [make_inputs(problem, seed, world.rank, world.device) for seed in range(sets)]
    static = [make_inputs(problem, seed, world.rank, world.device) for seed in (0, 1, 2)]
    for call in static:
        operator(*call.tensors, call.out)
    world.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [output_of(call, operator(*call.tensors, call.out)) for call in static]

    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    worst, firsts = 0.0, {}
    for i in range(replays):
        chosen = [(3 * i + j) % sets for j in range(3)]
        for call, seed in zip(static, chosen, strict=True):
            _load(call, drawn[seed])
        graph.replay()
        for call, out, seed in zip(static, outs, chosen, strict=True):
            if seed not in firsts:
                world.synchronize()
                assert operator.failure() is None, operator.failure()
                worst = max(worst, relative_error(out, reference(problem, seed, world.rank, world.device), call))
                firsts[seed] = out.clone()
            wrong += differing(out, firsts[seed])
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
    """Digests of the outputs of calls with equal inputs. Calls with other inputs run in between, and ranks are delayed by
    different times in each call.
    """
    context, operator = ready(world, problem, config)
    late = random.Random(world.rank)
    digests = []
    for number in range(2 * calls):
        call = make_inputs(problem, 0 if number % 2 == 0 else number, world.rank, world.device)
        call.poison()
        time.sleep(late.uniform(0, most_delay))
        out = output_of(call, operator(*call.tensors, call.out))
        world.synchronize()
        assert operator.failure() is None, operator.failure()
        if number % 2 == 0:
            outputs = out, *call.outputs[1:]
            written = [output.cpu().contiguous().view(torch.uint8).numpy().tobytes() for output in outputs]
            digests.append(hashlib.sha256(b"".join(written)).hexdigest()[:16])
    context.heap.close()
    return digests


def errors_of_sizes(world: World, problem: Problem, config: Config, smaller: list[Problem]) -> list[float]:
    """Like `errors_of`, with one call for each smaller problem, which the kernel of the larger problem must handle."""
    context, operator = ready(world, problem, config)
    errors = []
    for seed, size in enumerate(smaller):
        fitted = operator.fitted(size)
        assert fitted is not None, size
        call = make_inputs(size, seed, world.rank, world.device)
        call.poison()
        out = output_of(call, fitted(*call.tensors, call.out))
        world.synchronize()
        assert fitted.failure() is None, fitted.failure()
        errors.append(relative_error(out, reference(size, seed, world.rank, world.device), call))
    context.heap.close()
    return errors


def error_of_one_sign(world: World, problem: Problem, config: Config) -> float:
    """The relative error of an All-Gather + GEMM of e4m3 whose terms are all positive. Each step of a tensor core cuts them off
    in the same direction, so this is the worst case of sums with few bits.
    """
    context, operator = ready(world, problem, config)
    calls = [make_inputs(problem, 0, rank, world.device) for rank in range(world.size)]
    for call in calls:
        for codes in call.tensors[:2]:
            codes.view(torch.uint8).bitwise_and_(0x7F)
    of_ranks = [numbers(problem, call.tensors) for call in calls]
    right = torch.cat([a for a, _ in of_ranks]) @ of_ranks[world.rank][1].t()
    call = calls[world.rank]
    out = output_of(call, operator(*call.tensors, call.out))
    world.synchronize()
    assert operator.failure() is None, operator.failure()
    world.barrier()
    context.heap.close()
    return relative_error(out, right)


def note_without(world: World, problem: Problem, config: Config, missing: int, polls: int) -> str | None:
    """The failure note of this rank if its peer `missing` never calls."""
    context = open_context(world, detect(world.backend), HEAP_BYTES, polls)
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
