"""What a command is asked to tune or compare: the problem named, those of a file, those missed, the usual pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotax.commands.saying import say
from autotax.errors import UsageError
from autotax.operators import operators
from autotax.options import DeployOptions, MachineOptions, ProblemOptions, SearchOptions, flags
from autotax.problem import Problem, with_world_size
from autotax.shapes import read_shapes

if TYPE_CHECKING:
    from autotax.hardware import Hardware
    from autotax.tuner import Settings

    Job = tuple[Problem, Settings]

GPU_PAIR_TRIALS, CPU_PAIR_TRIALS = 60, 10


def problems_of(what: ProblemOptions, shapes: Path | None, hardware: Hardware) -> list[Problem]:
    """Those of the file, or else the problem that was named. Raises UsageError for both, or neither."""
    if shapes is None:
        return [what.problem(hardware)]
    what.only_world_size("with --shapes")
    return read_shapes(shapes, what.world_size if what.world_size is not None else hardware.default_world_size)


def usual_pair(what: ProblemOptions, hardware: Hardware) -> list[Problem]:
    """A problem of each operator, of sizes that suit the machine."""
    what.only_world_size("without an operator")
    world_size = what.world_size if what.world_size is not None else hardware.default_world_size
    examples = [operator.examples[hardware.on_gpu] for operator in operators().values() if operator.examples]
    return [with_world_size(problem, world_size) for problem in examples]


def missed(
    what: ProblemOptions,
    deployed: DeployOptions,
    how: SearchOptions,
    where: MachineOptions,
    hardware: Hardware,
    settings: Settings,
) -> list[Job]:
    """What programs on this hardware asked for in vain and it can tune, each as it was asked for, most often first."""
    given = {"op": what.op, "shapes": how.shapes, **what.given}
    given |= {"mode": deployed.mode, "l2": deployed.l2, "skew": deployed.skew}
    if named := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{flags(named)} given with --misses, which bring their own: take the others out")
    with where.store(create=False) as store:
        misses = store.misses(hardware)
    jobs = []
    for miss in misses:
        try:
            jobs += jobs_of([miss.problem], replace(settings, conditions=miss.conditions), hardware)
        except UsageError as error:
            say(f"{miss.problem} was asked for {miss.count} times and is left out: {error}")
    return jobs


def jobs_of(problems: Sequence[Problem], settings: Settings, hardware: Hardware) -> list[Job]:
    """Each problem, with those of the variants asked for that it has. Raises UsageError as `check` does, for a variant that no
    problem has, and for a problem that has none of them.
    """
    from autotax.api import check
    from autotax.spaces import space_for

    check(problems, hardware)
    if not settings.variants:
        return [(problem, settings) for problem in problems]
    spaces = [space_for(problem, hardware) for problem in problems]
    if nowhere := [name for name in settings.variants if not any(name in space.variants for space in spaces)]:
        spaces[0].only(nowhere)
    jobs = []
    for space in spaces:
        own = [name for name in settings.variants if name in space.variants]
        if not set(own) - {"bsp"} and set(settings.variants) != {"bsp"}:  # nothing to be searched
            space.only(settings.variants)
        jobs.append((space.problem, replace(settings, variants=tuple(own))))
    return jobs
