"""`autotax compile`: configs compiled for a GPU of another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, ClassVar

from autotax.cli.options import OutputOptions, ProblemOptions, check_variants, names_of, number, word
from autotax.core.errors import UsageError, did_you_mean
from autotax.core.problem import Problem
from autotax.core.settings import Settings
from autotax.core.terminal import console

if TYPE_CHECKING:
    from autotax.core.config import Config
    from autotax.hardware import Hardware
    from autotax.runner.precompile import Surveyed

SURVEYED = 8
"""Configs of each variant to compile."""
TARGETS = ("cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950")
"""The GPUs that `autotax compile` knows: `kernels.offline.TARGETS`, which would take seconds to import."""


@dataclass(frozen=True)
class TargetOptions:
    """The configs to compile, and the GPU to compile for."""

    PANEL: ClassVar[str] = "Target"

    target: Annotated[str | None, word(f"The GPU: {', '.join(TARGETS)}. Required. --world-size is then 8 by default.")] = None
    variants: Annotated[str | None, word("Compile only these variants. Default: all.", metavar="A,B,...")] = None
    trials: Annotated[int | None, number(f"Configs of each variant, seeds first. Default: {SURVEYED}.")] = None

    def check(self) -> None:
        if self.target not in TARGETS:
            problem = "no target given" if self.target is None else f"target is {self.target!r}"
            guess = did_you_mean(self.target or "", TARGETS) or "give one of these as --target"
            raise UsageError(f"{problem}; allowed are {', '.join(TARGETS)}: {guess}")
        self.settings()
        check_variants(names_of(self.variants))

    def hardware(self) -> Hardware:
        """A stand-in for the target."""
        from autotax.kernels.offline import known_hardware

        return known_hardware(self.target or "")

    def settings(self) -> Settings:
        return Settings(trials=SURVEYED if self.trials is None else self.trials, variants=names_of(self.variants))


def compile_(what: ProblemOptions, aim: TargetOptions, form: OutputOptions) -> int:
    """Compile configs for a GPU that is not here: resources, spills and failures of each."""
    what.require()
    from autotax.report import documents, tables

    hardware = aim.hardware()
    problem = what.problem(hardware)
    surveyed = compile_all(problem, configs_of(problem, hardware, aim.settings()), hardware)
    ok = all(result.status == "ok" for result in surveyed)
    about = {"problem": problem.to_dict(), "target": hardware.target}
    table = lambda: tables.surveyed(problem, hardware, surveyed)  # noqa: E731
    return form.answer(table, lambda: documents.of_survey(surveyed), ok=ok, about=about)


def configs_of(problem: Problem, hardware: Hardware, settings: Settings) -> list[Config]:
    """`settings.trials` configs of each variant, its seeds first. Raises UsageError for a variant that the problem lacks."""
    from autotax.spaces import space_for

    space = space_for(problem, hardware)
    if settings.variants:
        space = space.only(settings.variants)
    return [config for variant in space.variants.values() for config in variant.some(settings.trials, Random(settings.seed))]


def compile_all(problem: Problem, configs: Sequence[Config], hardware: Hardware) -> list[Surveyed]:
    """Compiles all configs, with a progress bar on a terminal."""
    from rich.progress import track

    from autotax.runner.precompile import survey

    bar = console(stderr=True)
    under_way = survey(problem, configs, hardware)
    return list(track(under_way, "compiling", len(configs), console=bar, transient=True, disable=not bar.is_terminal))
