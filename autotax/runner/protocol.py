"""What passes between the tuner's process and its ranks and compilers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels.resources import Resources
from autotax.runner.measurement import Candidate, Effort, RankReport, Reading
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
    """What to load first: modules with further operators and variants."""


@dataclass(frozen=True)
class Job:
    """One lockstep step of all ranks: measure these candidates, interleaved."""

    sequence: int
    problem: Problem
    candidates: tuple[Candidate, ...]
    effort: Effort
    seed: int
    """Of all that is drawn at random while the job is done: delays of the ranks, order of the inputs."""


@dataclass(frozen=True)
class Hello:
    """A rank is ready, and this is what it would run."""

    environment: Environment
    loaded: Mapping[str, str]
    """The digest of each module that it has loaded beside the package."""


@dataclass(frozen=True)
class Stage:
    """What a rank is doing now: told before it may hang there."""

    text: str


@dataclass(frozen=True)
class Raised:
    """A rank met an error at its stage, and its peers may wait for it in vain. If they all agree on it nevertheless, the next
    message of this rank says so.
    """

    status: str
    text: str
    at: float = field(default_factory=time.monotonic)
    """On the clock that all processes of the machine share."""


@dataclass(frozen=True)
class Report:
    """A rank's answer to a job: one account a candidate."""

    accounts: tuple[RankReport, ...]
    yardstick: Reading | None = None
    """Of the fixed work that was done beside the samples; None if none were taken."""
    seconds: float = 0.0
    """From the job's arrival to this report."""


@dataclass(frozen=True)
class Fatal:
    """A rank that can no longer be used, with the reason; it exits."""

    text: str
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Compilation:
    """For a compiler process: compile all kernels of a config for the hardware's target."""

    problem: Problem
    config: Config
    hardware: Hardware


@dataclass(frozen=True)
class CompilerReady:
    """A compiler process has imported what it needs."""


@dataclass(frozen=True)
class CompilerAnswer:
    """How it went. An error that was raised can be met again safely; one that took the compiler with it (`lost`) cannot."""

    error: str | None
    lost: bool = False
    kernels: tuple[Resources, ...] = ()
    """What was compiled; nothing for a config without kernels of ours."""
