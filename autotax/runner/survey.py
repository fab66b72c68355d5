"""Compiling many configs for a GPU that is not here: what they would take of it, and which fail."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels.resources import Resources
from autotax.operators import loaded
from autotax.runner.precompile import CompileAhead


@dataclass(frozen=True)
class Surveyed:
    """How a config compiles: `ok`, `compile_error`, or `out_of_resources` if a kernel would not fit the target."""

    config: Config
    status: str
    error: str | None = None
    kernels: tuple[Resources, ...] = ()
    """None for a config that is made of libraries' kernels alone."""


def survey(problem: Problem, configs: Sequence[Config], hardware: Hardware, modules: tuple[str, ...] = ()) -> Iterator[Surveyed]:
    """Compiles each config for `hardware.target`, in a process a processor of this machine; yields them in their order. A
    compiler that aborts or hangs costs its config only.
    """
    compilers = CompileAhead(hardware, os.cpu_count() or 1, tuple(dict.fromkeys((*loaded(), *modules))))
    try:
        compilers.expect(problem, configs)
        for config in configs:
            answer = compilers.outcome(problem, config)
            status, error = ("compile_error", answer.error) if answer.error else _fits(answer.kernels, hardware)
            yield Surveyed(config, status, error, answer.kernels)
    finally:
        compilers.close()


def _fits(kernels: Sequence[Resources], hardware: Hardware) -> tuple[str, str | None]:
    there = hardware.shared_memory
    for kernel in kernels:
        if kernel.shared > there:
            taken = f"{kernel.kernel} takes {kernel.shared} bytes of shared memory"
            return "out_of_resources", f"{taken}; {hardware.target} has {there} for a program"
    return "ok", None
