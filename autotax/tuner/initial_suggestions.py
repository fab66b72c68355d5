"""THE OPENING of a run: the space that it searches, and what it asks for before anything is measured.

Both are known in advance. So compilers that are idle while the finalists of one problem are measured begin with the next problem.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.db import Store
from autotax.db.staleness import Place
from autotax.db.warm_start import known_precedents
from autotax.hardware import Environment, Hardware
from autotax.operators import registry
from autotax.runner.measurement import Runner
from autotax.spaces import Space, space_for
from autotax.tuner.prior import usual_sampler
from autotax.tuner.search import Search

UPCOMING = 16
"""Configs that idle compilers may begin with: as many as there are compilers at most."""


def opened(settings: Settings, problem: Problem, hardware: Hardware, space: Space | None = None) -> tuple[Settings, Space]:
    """Settings without gaps, and the space of the variants that they name. Raises UsageError for those that do not fit."""
    space = space or space_for(problem, hardware)
    if settings.variants:
        space = space.only(("bsp", *settings.variants) if "bsp" in space.variants else settings.variants)
    settings = settings.on(hardware)
    return replace(settings, sampler=settings.sampler or usual_sampler(problem, hardware)), space


def without_ladder(space: Space, won: Collection[Config]) -> Space:
    """Variants that are measured to explain where time goes are searched only where they have won before."""
    winners = {config.variant for config in won}
    ladder = {name for name, variant in registry.of(space.problem).variants.items() if variant.role == "ladder"}
    return space.only([name for name in space.variants if name not in ladder - winners])


def compile_ahead(
    problem: Problem, hardware: Hardware, runner: Runner, store: Store, environment: Environment, settings: Settings
) -> None:
    """Gives idle compilers what a new run of this problem will ask for first."""
    settings, space = opened(settings, problem, hardware)
    assert settings.conditions is not None
    won = known_precedents(problem, Place(hardware, environment, settings.conditions), store, space.__contains__)
    search = Search(space if settings.variants else without_ladder(space, won), settings, won)
    first = iter(search.ask, None)
    asked = [config for config, _ in zip(first, range(min(runner.foresight, settings.trials)), strict=False)]
    runner.expect(problem, [], chain(asked, search.upcoming(UPCOMING)))
