"""The conformance suite of operators and variants, for CPU ranks and GPUs. Its functions run on all ranks (see
`autotax.runner.ranks`).
"""

from __future__ import annotations

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
        out = output_of(call, operator(*call.tensors, call.out))
        world.synchronize()
        assert operator.failure() is None, operator.failure()
        errors.append(relative_error(out, reference(problem, seed, world.rank, world.device), call))
    context.heap.close()
    return errors


def output_of(call: Call, result: torch.Tensor | None) -> torch.Tensor:
    """The output of a call: what the kernel returned, or else the output tensor."""
    return call.out if result is None else result


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
    from autotax.operators.verification import tolerance
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
                    if not worst <= tolerance(problem):
                        failures.append(f"{config} of {problem.key}: error {worst:.3g}, allowed {tolerance(problem):g}")
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
