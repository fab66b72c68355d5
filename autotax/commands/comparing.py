"""Comparing many problems on one pool of ranks: what fails for one does not end the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autotax.commands.ranks import ranks
from autotax.commands.saying import say
from autotax.config import Config
from autotax.errors import MachineError
from autotax.options import Where
from autotax.problem import Problem

if TYPE_CHECKING:
    from autotax.conditions import Conditions
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner.compare import Comparison


def compare_all(
    problems: Sequence[Problem], hardware: Hardware, conditions: Conditions, where: Where, *, every_variant: bool
) -> Iterator[Comparison]:
    """The comparison of each problem as it comes, those of one world size on one pool of ranks. An interrupt ends it."""
    for world_size in dict.fromkeys(problem.world_size for problem in problems):
        with ranks(hardware, world_size) as runner:
            for problem in (problem for problem in problems if problem.world_size == world_size):
                yield _compare_one(problem, hardware, runner, conditions, where, every_variant)


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
