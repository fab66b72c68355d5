"""Which configs of a space are compiled for a GPU that is not here, and how it goes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from autotax.core.problem import Problem
from autotax.core.terminal import console

if TYPE_CHECKING:
    from autotax.core.config import Config
    from autotax.hardware import Hardware
    from autotax.runner.precompile import Surveyed
    from autotax.tuner import Settings


def configs_of(problem: Problem, hardware: Hardware, settings: Settings) -> list[Config]:
    """So many of each variant, its seeds first. Raises UsageError for a variant that the problem has not."""
    from autotax.spaces import space_for

    space = space_for(problem, hardware)
    if settings.variants:
        space = space.only(settings.variants)
    return [config for variant in space.variants.values() for config in variant.some(settings.trials, Random(settings.seed))]


def compile_all(problem: Problem, configs: Sequence[Config], hardware: Hardware) -> list[Surveyed]:
    """All of them, with a bar on a terminal meanwhile."""
    from rich.progress import track

    from autotax.runner.precompile import survey

    bar = console(stderr=True)
    under_way = survey(problem, configs, hardware)
    return list(track(under_way, "compiling", len(configs), console=bar, transient=True, disable=not bar.is_terminal))
