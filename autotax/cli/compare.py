"""`autotax compare` and `autotax taxes`: configs of a problem measured in one run, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from autotax.cli.messages import Failed, say
from autotax.cli.options import DeployOptions, LimitedOptions, MachineOptions, ProblemOptions, flag, seconds_of
from autotax.cli.problem_selection import problems_of, warn_of_slow_ranks
from autotax.core.errors import MachineError
from autotax.core.problem import Problem
from autotax.operators import of as operator_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotax.core.conditions import Conditions
    from autotax.hardware import Hardware
    from autotax.tuner.comparison import Comparison
    from autotax.tuner.tuning import TimeLimit

@dataclass(frozen=True)
class CompareOptions(LimitedOptions):
    """The problems and rows of a comparison."""

    every_variant: Annotated[bool, flag("--variants", "Add a row for every variant, with its best known config.")] = False


def compare(what: ProblemOptions, which: CompareOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Measure the tuned config, BSP and the alternatives, interleaved in one run."""
    from autotax.report import documents, tables

    compared, done = compare_and_show(what, which, deployed, where, tables.comparison, lambda _: which.every_variant)
    means = None if which.shapes is None else lambda: tables.means(compared)
    return where.answer(means, lambda: map(documents.of_comparison, compared), ok=done)


def taxes(what: ProblemOptions, of: LimitedOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Show where the time of bulk-synchronous calls goes, and how much of it the tuned config wins back."""
    from autotax.report import documents, tables

    ladder: Callable[[Problem], bool] = lambda problem: bool(operator_of(problem).ladder)  # noqa: E731
    compared, done = compare_and_show(what, of, deployed, where, tables.taxes, ladder)
    return where.answer(None, lambda: map(documents.of_taxes, compared), ok=done)


COMPARED = 6
"""A comparison of one problem takes about as long as this many trials."""


def compare_and_show(
    what: ProblemOptions, of: LimitedOptions, deployed: DeployOptions, where: MachineOptions,
    table: Callable[[Comparison], RenderableType], every_variant: Callable[[Problem], bool],
) -> tuple[list[Comparison], bool]:  # fmt: skip
    """Shows and returns the comparisons in the order of the problems, and whether all succeeded.

    An interrupt keeps the finished comparisons of a file. `every_variant` selects the problems with a row for each variant.
    """
    from autotax.hardware import check_problems
    from autotax.tuner.tuning import TimeLimit

    if of.shapes is None:
        what.require()
    limit = TimeLimit(seconds_of(of.timeout))
    hardware, many = where.hardware(), of.shapes is not None
    conditions = deployed.conditions(hardware)
    problems = problems_of(what, of.shapes, hardware)
    check_problems(problems, hardware)
    for problem in problems:
        warn_of_slow_ranks(problem, hardware, COMPARED)
    compared: list[Comparison] = []
    try:
        for comparison in _compare_all(problems, hardware, conditions, where, every_variant, limit):
            compared.append(comparison)
            where.show(lambda: table(compared[-1]))
            if where.as_json and many:
                say(f"{len(compared)} of {len(problems)} compared: {comparison.problem}")
    except (KeyboardInterrupt, Failed) as stop:
        if not many:
            raise
        say(f"{stop or 'interrupted'}; {len(compared)} of {len(problems)} problems were compared")
    if not limit.left and many:
        say(f"{limit} is over; {sum(bool(one.rows) for one in compared)} of {len(problems)} problems were compared")
    compared.sort(key=lambda comparison: problems.index(comparison.problem))
    return compared, len(compared) == len(problems) and all(comparison.ok for comparison in compared)


def _compare_all(
    problems: Sequence[Problem], hardware: Hardware, conditions: Conditions, where: MachineOptions,
    every_variant: Callable[[Problem], bool], limit: TimeLimit,
) -> Iterator[Comparison]:  # fmt: skip
    """Yields the comparisons. Each world size has one pool of ranks. No problem begins after the time limit."""
    from autotax.api import compare_on, ranks
    from autotax.tuner import Comparison

    for world_size in dict.fromkeys(problem.world_size for problem in problems):
        with ranks(hardware, world_size) as runner:
            for problem in (problem for problem in problems if problem.world_size == world_size):
                if not limit.left:
                    return
                try:
                    comparison = compare_on(runner, problem, hardware, conditions, where.db, every_variant(problem), limit)
                except MachineError as error:
                    comparison = Comparison(problem, hardware, conditions, (), None, str(error))
                if comparison.error:
                    say(f"{problem} could not be compared: {comparison.error}")
                elif comparison.answer and comparison.answer.match == "fallback":
                    say(f"nothing is tuned for this problem, so BSP is compared with itself: {comparison.answer.reason}")
                for notice in dict.fromkeys(notice for row in comparison.rows for notice in row.measurement.notices):
                    say(f"notice: {notice}")
                yield comparison
