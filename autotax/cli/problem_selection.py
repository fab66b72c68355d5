"""The problems of a command: a named one, the problems of a file, missed look-ups, or the usual examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotax.cli.messages import say
from autotax.cli.options import DeployOptions, MachineOptions, ProblemOptions, SearchOptions, flags, spelled
from autotax.core.errors import UsageError
from autotax.core.problem import Problem, with_world_size
from autotax.operators import of as operator_of
from autotax.operators import operators
from autotax.operators.problem_files import read_shapes

if TYPE_CHECKING:
    from autotax.hardware import Hardware
    from autotax.tuner import Settings

    Job = tuple[Problem, Settings]

GPU_PAIR_TRIALS, CPU_PAIR_TRIALS = 60, 10
CPU_TRIAL_S = 2.0
"""Seconds of a trial of an operator's example on CPU ranks of a laptop, including its share of the finalists' measurements."""
CPU_FREE = 10
"""A problem with up to this many times the bytes of the example takes no longer than the example, which is mostly overhead."""
NOT_SIZES = ("op", "world_size")
HOPELESS_S = 4 * 3600.0
PATIENCE_S = 60.0
"""A command warns of runs on CPU ranks that take longer, in seconds."""


def problems_of(what: ProblemOptions, shapes: Path | None, hardware: Hardware) -> list[Problem]:
    """The problems of the file, or else the one that was named. Raises UsageError for both, or neither."""
    if shapes is None:
        return [what.problem(hardware)]
    what.only_world_size("with --shapes")
    return read_shapes(shapes, what.world_size if what.world_size is not None else hardware.default_world_size)


def expected_on_cpu(problem: Problem, trials: int) -> float:
    """Estimated seconds of CPU ranks for a problem, from its size relative to its operator's example."""
    example = operator_of(problem).examples.get(False)
    return trials * CPU_TRIAL_S * (max(1.0, problem.nbytes / (CPU_FREE * example.nbytes)) if example else 1.0)


def warn_of_slow_ranks(problem: Problem, hardware: Hardware, trials: int) -> None:
    """Warns if CPU ranks will take longer than a minute for a problem, and suggests a small one."""
    example = operator_of(problem).examples.get(False)
    if hardware.on_gpu or example is None:
        return
    seconds = expected_on_cpu(problem, trials)
    if seconds <= PATIENCE_S:
        return
    sizes = {name: value for name, value in example.to_dict().items() if name not in NOT_SIZES}
    small = f"{spelled(example.op, sizes)} --trials {CPU_PAIR_TRIALS}"
    minutes = round(seconds / 60)
    about = f"about {minutes} minute{'s' * (minutes > 1)}"
    about = about if seconds < HOPELESS_S else "hours, and most trials may exceed their time limit"
    say(f"CPU ranks interpret kernels, which is slow: {problem} may take {about}; for a quick look: autotax tune {small}")


def usual_pair(what: ProblemOptions, hardware: Hardware) -> list[Problem]:
    """One example problem of each operator, sized for this machine."""
    what.only_world_size("without an operator")
    world_size = what.world_size if what.world_size is not None else hardware.default_world_size
    examples = [operator.examples[hardware.on_gpu] for operator in operators().values() if operator.examples]
    return [with_world_size(problem, world_size) for problem in examples]


def missed(
    what: ProblemOptions, deployed: DeployOptions, how: SearchOptions, where: MachineOptions, hardware: Hardware,
    settings: Settings,
) -> list[Job]:  # fmt: skip
    """The problems that programs on this hardware looked up without success, each with its conditions, most frequent first."""
    conflicting = {"op": what.op, "shapes": how.shapes, **what.given}
    conflicting |= {"mode": deployed.mode, "l2": deployed.l2, "skew": deployed.skew}
    if names := [name for name, value in conflicting.items() if value is not None]:
        raise UsageError(f"{flags(names)} given with --misses, which has its own problems and conditions: take the others out")
    with where.store(create=False) as store:
        misses = store.misses(hardware)
    jobs = []
    for miss in misses:
        try:
            jobs += jobs_of([miss.problem], replace(settings, conditions=miss.conditions), hardware)
        except UsageError as error:
            say(f"{miss.problem} was looked up {miss.count} times and is left out: {error}")
    return jobs


def jobs_of(problems: Sequence[Problem], settings: Settings, hardware: Hardware) -> list[Job]:
    """Each problem with the requested variants that it has. Raises UsageError like `check`, for a variant that no problem has,
    and for a problem that has none of the requested variants.
    """
    from autotax.hardware import check_problems
    from autotax.spaces import space_for

    check_problems(problems, hardware)
    if not settings.variants:
        return [(problem, settings) for problem in problems]
    spaces = [space_for(problem, hardware) for problem in problems]
    if nowhere := [name for name in settings.variants if not any(name in space.variants for space in spaces)]:
        spaces[0].only(nowhere)
    jobs = []
    for space in spaces:
        own = [name for name in settings.variants if name in space.variants]
        if not set(own) - {"bsp"} and set(settings.variants) != {"bsp"}:  # nothing to search
            space.only(settings.variants)
        jobs.append((space.problem, replace(settings, variants=tuple(own))))
    return jobs
