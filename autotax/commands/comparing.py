"""Comparing many problems on one pool of ranks: what fails for one does not end the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autotax.commands.asked import check, problems_of
from autotax.commands.ranks import ranks
from autotax.commands.saying import Failed, say
from autotax.config import Config
from autotax.errors import MachineError
from autotax.options import As, Of, What, Where
from autotax.problem import Problem

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotax.conditions import Conditions
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner.compare import Comparison


def compare_and_show(
    what: What,
    of: Of,
    deployed: As,
    where: Where,
    table: Callable[[Comparison], RenderableType],
    every_variant: Callable[[Problem], bool],
) -> tuple[list[Comparison], bool]:
    """The comparisons in the order of the problems, each shown as it comes, and whether all could be made. Of problems from a
    file an interrupt leaves those that are done. `every_variant` says which problems get a row for each of theirs.
    """
    hardware, many = where.hardware(), of.shapes is not None
    conditions = deployed.conditions(hardware)
    problems = problems_of(what, of.shapes, hardware)
    check(problems, hardware)
    compared: list[Comparison] = []
    try:
        for comparison in _compare_all(problems, hardware, conditions, where, every_variant):
            compared.append(comparison)
            where.show(lambda: table(compared[-1]))
            if where.as_json and many:
                say(f"{len(compared)} of {len(problems)} compared: {comparison.problem}")
    except (KeyboardInterrupt, Failed) as stop:
        if not many:
            raise
        say(f"{stop or 'interrupted'}; {len(compared)} of {len(problems)} problems are compared")
    compared.sort(key=lambda comparison: problems.index(comparison.problem))
    return compared, len(compared) == len(problems) and all(comparison.ok for comparison in compared)


def _compare_all(
    problems: Sequence[Problem],
    hardware: Hardware,
    conditions: Conditions,
    where: Where,
    every_variant: Callable[[Problem], bool],
) -> Iterator[Comparison]:
    """Those of one world size on one pool of ranks."""
    for world_size in dict.fromkeys(problem.world_size for problem in problems):
        with ranks(hardware, world_size) as runner:
            for problem in (problem for problem in problems if problem.world_size == world_size):
                yield _compare_one(problem, hardware, runner, conditions, where, every_variant(problem))


def _compare_one(
    problem: Problem, hardware: Hardware, runner: LiveRunner, conditions: Conditions, where: Where, every_variant: bool
) -> Comparison:
    from autotax import tuner
    from autotax.db.lookup import lookup
    from autotax.spaces import space_for
    from autotax.tuner.choices import Choice, baseline_for, best_of, trials_here
    from autotax.tuner.compare import Comparison, shown_variants

    answer = lookup(problem, hardware=hardware, db=where.db, conditions=conditions)
    if answer.match == "fallback":
        say(f"nothing tuned to compare, BSP stands in for it: {answer.reason}")
    space = space_for(problem, hardware)
    with where.store(create=False) as store:
        trials = trials_here(store, space, conditions)
        baseline = baseline_for(answer, store, trials, space, conditions)
    shown = shown_variants(problem, hardware, list(space.variants), every=every_variant)
    try:
        found = tuner.compare(
            problem,
            hardware=hardware,
            runner=runner,
            tuned=Choice(Config(answer.variant, answer.params), f"look-up: {answer.match}"),
            baseline=baseline,
            variants=[baseline if variant == "bsp" else best_of(variant, trials, space) for variant in shown],
            conditions=conditions,
        )
    except MachineError as error:
        say(f"{problem} could not be compared: {error}")
        return Comparison(problem, hardware, conditions, (), answer, str(error))
    for notice in dict.fromkeys(notice for row in found.rows for notice in row.measurement.notices):
        say(f"notice: {notice}")
    return replace(found, answer=answer)
