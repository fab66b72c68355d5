"""What every operator must do: the conformance suite of declarations.

    from autotax.testing import check_operator
    print(check_operator("my-operator"))

On CPU ranks each variant is called with several input sets through the same workspaces, outputs poisoned, at sizes that no tile
divides. Kernels are compiled for GPUs that need not be here. Bad input must be refused in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.operators import Operator, loaded, named, problem_from_dict, with_world_size
from autotax.spaces import space_for

WORLDS = (2, 3)
CALLS = 3
"""Slots of an inbox are used again from the third call on; odd input sets are ragged."""
TARGETS = ("cuda:90", "hip:gfx942")
CONFIGS = 2
"""Configs of each variant and problem: the default, and one at random."""
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Checked:
    """How much was checked: calls on CPU ranks, kernels compiled, refusals."""

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
    """Runs the suite. Raises AssertionError with a line for each failure.

    `problems` are checked on CPU ranks beside those that follow from the operator's example; `variants` default to all.
    """
    declared = named(operator) if isinstance(operator, str) else operator
    chosen = list(dict.fromkeys([*_examples(declared), *problems]))
    if not chosen:
        raise UsageError(f"{declared.name} has no example for CPU ranks: declare one with operator.example, or give problems")
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
        except UsageError:  # not for so many ranks
            continue
        yield whole
        for name in whole.varying():
            size = getattr(whole, name)
            for smaller in (max(1, size - size // 3 - 1), 1):
                odd: dict[str, Any] = {name: smaller}
                with suppress(UsageError):  # no size of this operator
                    yield replace(whole, **odd)


def _check_refusals(problem: Problem, failures: list[str]) -> int:
    """A problem is its JSON, and what is none is refused in one line that says what was given."""
    if problem_from_dict(problem.to_dict()) != problem:
        failures.append(f"{problem.key} is not what its own to_dict() makes")
    count = 0
    for each in fields(problem):
        for bad in (0.5, "nothing", None, -1):
            count += 1
            try:
                problem_from_dict(problem.to_dict() | {each.name: bad})
            except UsageError as refusal:
                if "\n" in str(refusal) or repr(bad) not in str(refusal):
                    failures.append(f"{each.name} {bad!r} is refused by {str(refusal)!r}: name the value, in one line")
            except Exception as error:
                failures.append(f"{each.name} {bad!r} raises {type(error).__name__} and not UsageError")
            else:
                failures.append(f"{each.name} {bad!r} is accepted")
    return count


def _check_calls(
    operator: Operator[Any], problems: Sequence[Problem], variants: Sequence[str] | None, failures: list[str]
) -> int:
    from autotax.operators.verification import TOLERANCE
    from autotax.testing.calls import errors_of
    from autotax.testing.ranks import RankFailure, Ranks

    count = 0
    for world in dict.fromkeys(problem.world_size for problem in problems):
        with Ranks(world, modules=loaded()) as ranks:
            for problem in (problem for problem in problems if problem.world_size == world):
                for config in _configs(operator, problem, variants):
                    count += CALLS * world
                    try:
                        found = ranks.run(errors_of, problem, config, CALLS, timeout=DEADLINE_S)
                    except RankFailure as failure:
                        failures.append(f"{config} of {problem.key}: {str(failure).strip().splitlines()[-1]}")
                        continue
                    worst = max(max(errors) for errors in found)
                    if not worst <= TOLERANCE[problem.out_dtype]:
                        failures.append(f"{config} of {problem.key}: error {worst:.3g}, allowed {TOLERANCE[problem.out_dtype]:g}")
    return count


def _configs(operator: Operator[Any], problem: Problem, variants: Sequence[str] | None) -> list[Config]:
    space = space_for(problem, detect("cpu"))
    names = [name for name in space.variants if variants is None or name in variants]
    random = Random(f"{operator.name}/{problem.key}")
    found = [config for name in names for config in [*space.variants[name].some(1, random), *_another(space, name, random)]]
    return list(dict.fromkeys(found))


def _another(space: Any, name: str, random: Random) -> list[Config]:
    """Some admitted configs that are no seeds."""
    points = (space.variants[name].point(random) for _ in range(100))
    return [config for config in points if config in space][: CONFIGS - 1]


def _check_compiling(
    operator: Operator[Any], variants: Sequence[str] | None, targets: Sequence[str], failures: list[str]
) -> int:
    from autotax.kernels.offline import known_hardware
    from autotax.runner.survey import survey

    count = 0
    for target in targets:
        hardware = known_hardware(target)
        problem = operator.examples.get(True) or operator.examples[False]
        problem = with_world_size(problem, 2)
        space = space_for(problem, hardware)
        configs = [space.default(name) for name in space.variants if variants is None or name in variants]
        for found in survey(problem, configs, hardware):
            count += len(found.kernels)
            if found.status != "ok":
                failures.append(f"{found.config} for {target}: {found.status}: {' '.join((found.error or '').split())[:300]}")
    return count
