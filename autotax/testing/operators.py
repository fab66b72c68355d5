"""The conformance suite of operators and variants, for CPU ranks and GPUs. Its functions run on all ranks (see
`autotax.runner.ranks`).
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.offline import fix_cache_keys
from autotax.operators import Operator, loaded, named, problem_from_dict, with_world_size
from autotax.operators.inputs import Call
from autotax.operators.verification import make_inputs, reference, relative_error
from autotax.runner.rank_worker import open_context
from autotax.spaces import space_for

HEAP_BYTES = 256 << 20


def ready(world: World, problem: Problem, config: Config) -> tuple[Context, Kernel]:
    """The context of this rank, and the kernel of a config, compiled but not run. Collective."""
    if world.device.type == "cuda":
        fix_cache_keys()  # so that kernels that were compiled ahead are found
    context = open_context(world, detect(world.backend), HEAP_BYTES)
    operator = prepare(problem, config, context)
    context.heap.check()
    with context.rehearsal():
        first = make_inputs(problem, 0, world.rank, world.device)
        operator(*first.tensors, first.out)
    world.barrier()
    return context, operator


def errors_of(world: World, problem: Problem, config: Config, calls: int) -> list[float]:
    """Relative error of each of several calls with different inputs through the same workspaces, outputs poisoned."""
    context, operator = ready(world, problem, config)
    errors = []
    for seed in range(calls):
        call = make_inputs(problem, seed, world.rank, world.device)
        call.poison()
        out = _output(call, operator(*call.tensors, call.out))
        world.synchronize()
        assert operator.failure() is None, operator.failure()
        errors.append(relative_error(out, reference(problem, seed, world.rank, world.device), call))
    context.heap.close()
    return errors


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
        outs = [_output(call, operator(*call.tensors, call.out)) for call in static]

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


def _output(call: Call, result: torch.Tensor | None) -> torch.Tensor:
    """The output of a call: what the kernel returned, or else the output tensor."""
    return call.out if result is None else result


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
        out = _output(call, operator(*call.tensors, call.out))
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
        out = _output(call, fitted(*call.tensors, call.out))
        world.synchronize()
        assert fitted.failure() is None, fitted.failure()
        errors.append(relative_error(out, reference(size, seed, world.rank, world.device), call))
    context.heap.close()
    return errors


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


# The conformance suite of operator declarations.

WORLDS = (2, 3)
CALLS = 3
"""Slots of an inbox are used again from the third call on; odd input sets are ragged."""
TARGETS = ("cuda:90", "hip:gfx942")
CONFIGS = 2
"""Configs of each variant and problem: the default, and one at random."""
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Checked:
    """The numbers of checks: calls on CPU ranks, compiled kernels, refusals."""

    calls: int
    compiled: int
    refusals: int

    def __str__(self) -> str:
        return f"{self.calls} calls right, {self.compiled} kernels compiled, {self.refusals} refusals in one line"


def check_operator(
    operator: str | Operator[Any],
    problems: Sequence[Problem] = (),
    *,
    variants: Sequence[str] | None = None,
    targets: Sequence[str] = TARGETS,
) -> Checked:
    """Runs the suite. Raises AssertionError with a line for each failure, or for each part that the declaration lacks.

    `problems` are checked on CPU ranks in addition to those derived from the operator's example; `variants` default to all.
    """
    declared = named(operator) if isinstance(operator, str) else operator
    if lacking := [what for what in declared.lacking() if not (problems and what.startswith("an example"))]:
        raise AssertionError("\n".join(f"{declared.name} lacks {what}" for what in lacking))
    chosen = list(dict.fromkeys([*_examples(declared), *problems]))
    failures: list[str] = []
    refusals = _check_refusals(chosen[0], failures)
    calls = _check_calls(declared, chosen, variants, failures)
    compiled = _check_compiling(declared, variants, targets, failures)
    if failures:
        raise AssertionError("\n".join(f"{declared.name}: {failure}" for failure in failures))
    return Checked(calls, compiled, refusals)


def _examples(operator: Operator[Any]) -> Iterator[Problem]:
    """The example for CPU ranks with each number of ranks, and with each varying size a little smaller."""
    example: Any = operator.examples.get(False)
    for world in WORLDS if example else ():
        try:
            whole: Problem = with_world_size(example, world)
        except UsageError:  # the example does not allow this number of ranks
            continue
        yield whole
        for name in whole.varying():
            size = getattr(whole, name)
            for smaller in (max(1, size - size // 3 - 1), 1):
                odd: dict[str, Any] = {name: smaller}
                with suppress(UsageError):  # the operator does not allow this size
                    yield replace(whole, **odd)


def _check_refusals(problem: Problem, failures: list[str]) -> int:
    """Checks that a problem survives its JSON, and that invalid problems are refused in one line that quotes the given value."""
    if problem_from_dict(problem.to_dict()) != problem:
        failures.append(f"{problem.key} is not what its own to_dict() makes")
    count = 0
    for entry in fields(problem):
        for bad in (0.5, "nothing", None, -1):
            count += 1
            try:
                problem_from_dict(problem.to_dict() | {entry.name: bad})
            except UsageError as refusal:
                if "\n" in str(refusal) or repr(bad) not in str(refusal):
                    failures.append(f"{entry.name} {bad!r} is refused by {str(refusal)!r}: name the value, in one line")
            except Exception as error:
                failures.append(f"{entry.name} {bad!r} raises {type(error).__name__} and not UsageError")
            else:
                failures.append(f"{entry.name} {bad!r} is accepted")
    return count


def _check_calls(
    operator: Operator[Any], problems: Sequence[Problem], variants: Sequence[str] | None, failures: list[str]
) -> int:
    from autotax.operators.verification import TOLERANCE
    from autotax.runner.ranks import RankFailure, Ranks

    count = 0
    for world in dict.fromkeys(problem.world_size for problem in problems):
        with Ranks(world, modules=loaded()) as ranks:
            for problem in (problem for problem in problems if problem.world_size == world):
                for config in _configs(operator, problem, variants):
                    count += CALLS * world
                    try:
                        relative_errors = ranks.run(errors_of, problem, config, CALLS, timeout=DEADLINE_S)
                    except RankFailure as failure:
                        failures.append(f"{config} of {problem.key}: {str(failure).strip().splitlines()[-1]}")
                        continue
                    worst = max(max(errors) for errors in relative_errors)
                    if not worst <= TOLERANCE[problem.out_dtype]:
                        failures.append(f"{config} of {problem.key}: error {worst:.3g}, allowed {TOLERANCE[problem.out_dtype]:g}")
    return count


def _configs(operator: Operator[Any], problem: Problem, variants: Sequence[str] | None) -> list[Config]:
    space = space_for(problem, detect("cpu"))
    names = [name for name in space.variants if variants is None or name in variants]
    random = Random(f"{operator.name}/{problem.key}")
    configs = [config for name in names for config in [*space.variants[name].some(1, random), *_another(space, name, random)]]
    return list(dict.fromkeys(configs))


def _another(space: Any, name: str, random: Random) -> list[Config]:
    """Some admitted configs that are no seeds."""
    points = (space.variants[name].point(random) for _ in range(100))
    return [config for config in points if config in space][: CONFIGS - 1]


def _check_compiling(
    operator: Operator[Any], variants: Sequence[str] | None, targets: Sequence[str], failures: list[str]
) -> int:
    from autotax.kernels.offline import known_hardware
    from autotax.runner.precompile import survey

    count = 0
    for target in targets:
        hardware = known_hardware(target)
        problem = operator.examples.get(True) or operator.examples[False]
        problem = with_world_size(problem, 2)
        space = space_for(problem, hardware)
        configs = [space.default(name) for name in space.variants if variants is None or name in variants]
        for report in survey(problem, configs, hardware):
            count += len(report.kernels)
            if report.status != "ok":
                failures.append(f"{report.config} for {target}: {report.status}: {' '.join((report.error or '').split())[:300]}")
    return count
