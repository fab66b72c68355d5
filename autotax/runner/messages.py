"""Messages between the tuner's process and its ranks and compilers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels.resources import Resources
from autotax.runner.measurement import Candidate, Effort, RankReport
from autotax.runner.yardsticks import Reading
from autotax.software import Environment


@dataclass(frozen=True)
class RankSetup:
    """How a rank process joins its group."""

    rank: int
    world_size: int
    backend: str
    meeting: str
    """`Meeting.address` of the group."""
    heap_bytes: int
    modules: tuple[str, ...]
    """Modules with further operators and variants, which the rank loads first."""


@dataclass(frozen=True)
class Job:
    """One lockstep step of all ranks: measure these candidates, interleaved."""

    sequence: int
    problem: Problem
    candidates: tuple[Candidate, ...]
    effort: Effort
    seed: int
    """Seeds all random numbers of the job: delays of the ranks, order of the inputs."""


@dataclass(frozen=True)
class Hello:
    """A rank is ready. The fields describe its software."""

    environment: Environment
    loaded: Mapping[str, str]
    """The digest of each module that it has loaded from outside this package."""


@dataclass(frozen=True)
class Stage:
    """The current stage of a rank, sent before the stage begins because the rank may hang in it."""

    text: str


@dataclass(frozen=True)
class Raised:
    """A rank raised an error in its stage. If all ranks still agree on the outcome, it sends its next message."""

    status: str
    text: str
    at: float = field(default_factory=time.monotonic)
    """Time of the error on the monotonic clock, which all processes of the machine share."""


@dataclass(frozen=True)
class Report:
    """A rank's answer to a job: one account a candidate."""

    accounts: tuple[RankReport, ...]
    yardstick: Reading | None = None
    """Reading of the yardstick taken next to the samples; None if there were no samples."""
    seconds: float = 0.0
    """From the job's arrival to this report."""


@dataclass(frozen=True)
class Fatal:
    """The rank can no longer be used and exits; the fields give the reason."""

    text: str
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Compilation:
    """Request to a compiler process: compile all kernels of a config for the hardware's target."""

    problem: Problem
    config: Config
    hardware: Hardware


@dataclass(frozen=True)
class CompilerReady:
    """A compiler process has done its imports and is ready."""


@dataclass(frozen=True)
class CompilerAnswer:
    """The outcome of a compilation. `lost` means that the compiler process died, so a rank must not compile this config. An error
    that was merely raised is safe to repeat.
    """

    error: str | None
    lost: bool = False
    kernels: tuple[Resources, ...] = ()
    """Resources of the compiled kernels; empty for a config without own kernels."""
