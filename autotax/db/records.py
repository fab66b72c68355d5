"""Records of a store, as frozen values without a database, and the ranking of winners in merges."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import TRIAL_STATUSES
from autotax.hardware import Hardware
from autotax.operators.registry import variant_digest
from autotax.software import Environment

Samples = list[list[float]]
"""Microseconds of each call, one list per rank."""


@dataclass(frozen=True)
class Place:
    """Hardware, software and conditions under which a config runs, or was measured."""

    hardware: Hardware
    software: Environment
    conditions: Conditions


@dataclass(frozen=True)
class RunRecord:
    """One call of the tuner: the problem, the place and the end. A run that was killed stays `running`."""

    id: int
    problem: Problem
    hardware: Hardware
    environment: Environment
    settings: dict[str, Any]
    status: str
    started_at: datetime
    ended_at: datetime | None = None
    notices: tuple[str, ...] = ()
    """Warnings for the user, one line each, in order of time."""
    accounts: dict[str, float] = field(default_factory=dict)
    """Figures of the run itself, for instance its seconds by kind of work; empty until it ends."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial of a config, successful or not. The store fills in the fields after `conditions`."""

    number: int
    """The trial's place in the run."""
    config: Config
    status: str
    latency_us: float | None = None
    """Median over samples of the maximum over ranks."""
    samples: Samples | None = field(default=None, repr=False)
    slowest_rank: int | None = None
    compile_s: float | None = None
    verified: bool = False
    """The output was compared with the reference, on all ranks, and is right."""
    relative_error: float | None = None
    """The greatest over ranks. NaN is kept as infinity, for SQL has no NaN."""
    error: str | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    """Conditions of the measurement: `Conditions.to_dict()` and more. Figures of different conditions cannot be compared."""

    kernel_digest: str | None = field(default=None, compare=False)
    """Digest of the variant's sources; None before the trial is stored, if it has the current sources."""
    id: int | None = field(default=None, compare=False)
    created_at: datetime | None = field(default=None, compare=False)
    run: RunRecord | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.status not in TRIAL_STATUSES:
            raise ValueError(f"trial status is {self.status!r}; allowed are {', '.join(TRIAL_STATUSES)}")
        if self.status == "ok" and self.latency_us is None:
            raise ValueError("a trial that is ok has a latency")

    @property
    def deployed(self) -> Conditions:
        """The conditions that its run tunes for. A search measures back to back, and its finalists are measured in place."""
        conditions = self.run.settings.get("conditions") if self.run else None
        return Conditions.from_dict(conditions if isinstance(conditions, dict) else self.conditions)

    @property
    def op(self) -> str:
        """The operator of its run; empty before the trial is stored."""
        return self.run.problem.op if self.run else ""

    @property
    def run_id(self) -> int | None:
        return self.run.id if self.run else None


@dataclass(frozen=True)
class WinnerRecord:
    """The config to run for a problem, and how far it was ahead of bulk-synchronous (BSP). At most one has each `key`."""

    problem: Problem
    hardware: Hardware
    environment: Environment
    trial_id: int
    config: Config
    kernel_digest: str = field(kw_only=True)
    """Digest of the variant's sources (`variant_digest`). When the sources change, the winner is stale."""
    latency_us: float
    baseline_us: float
    baseline: Config
    speedup: float
    """The median of the paired ratios of a job, averaged over the jobs as logarithms (`tuner.finalists.estimate`); it may differ
    from baseline_us / latency_us. The interval is that of another job.
    """
    interval_low: float
    interval_high: float
    tie: bool
    """The interval did not separate the finalists; `config` is the simplest of them."""
    verified: bool
    samples: dict[str, Samples] | None = field(default=None, repr=False)
    """All finalists of the round, by config digest."""
    conditions: Conditions = field(default_factory=Conditions)
    """The conditions of the finalist round."""
    machine_code: str | None = None
    """Digest of the machine code that was measured; None where unknown. The store keeps it with the trial."""

    created_at: datetime | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, str, str, int, str, str, str]:
        """(problem, hardware digest, kernel digest, world size, comm library, conditions, triton)."""
        world_size, conditions = self.problem.world_size, self.conditions.key
        where = self.hardware.digest, self.kernel_digest
        return (self.problem.key, *where, world_size, self.comm, conditions, self.environment.triton)

    @property
    def known_code(self) -> dict[str, str]:
        """The digest of its machine code as a field of files and trials, which lack it where it is unknown."""
        return {"machine_code": self.machine_code} if self.machine_code else {}

    @property
    def comm(self) -> str:
        return self.environment.comm

    @property
    def op(self) -> str:
        return self.problem.op

    @property
    def place(self) -> Place:
        return Place(self.hardware, self.environment, self.conditions)


@dataclass(frozen=True)
class MissRecord:
    """A problem that a program looked up without a winner."""

    problem: Problem
    hardware: Hardware
    conditions: Conditions
    count: int
    last_asked: datetime


# Ranking

Strength = tuple[bool, float, int, str, str]


@dataclass(frozen=True)
class Entry:
    """A winner in transfer between databases. Its `trial_id` is valid only in the database in which it was stored."""

    winner: WinnerRecord
    by: str | None = None
    """user@host that tuned it, if known."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        winner = self.winner
        return {
            "problem": winner.problem.to_dict(),
            "hardware": winner.hardware.to_dict(),
            "environment": winner.environment.to_dict(),
            "kernel_digest": winner.kernel_digest,
            "conditions": winner.conditions.to_dict(),
            "config": winner.config.to_dict(),
            "baseline": winner.baseline.to_dict(),
            "latency_us": winner.latency_us,
            "baseline_us": winner.baseline_us,
            "speedup": winner.speedup,
            "interval": [winner.interval_low, winner.interval_high],
            "tie": winner.tie,
            "verified": winner.verified,
            "samples": winner.samples,
            "tuned_at": winner.created_at.isoformat() if winner.created_at else None,
            "tuned_by": self.by,
        } | winner.known_code

    @cached_property
    def digest(self) -> str:
        """Digest of all fields but the author, who is unknown for own winners and anonymous exports."""
        fields = {name: value for name, value in self.to_dict().items() if name != "tuned_by"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def count(self) -> int:
        """Samples of the winning config in its round, over all ranks."""
        return sum(map(len, (self.winner.samples or {}).get(self.winner.config.digest, [])))

    @cached_property
    def strength(self) -> Strength:
        """Sort key of the ranking: verified, lower bound of the speed-up over bulk-synchronous, samples, digest."""
        return self.winner.verified, self.winner.interval_low, self.count, self.digest, self.by or ""


def merge(*sides: Iterable[Entry]) -> dict[tuple[object, ...], Entry]:
    """The strongest entry of each key. The order of the sides and of their entries does not matter."""
    best: dict[tuple[object, ...], Entry] = {}
    for entry in (entry for side in sides for entry in side):
        key = entry.winner.key
        if key not in best or entry.strength > best[key].strength:
            best[key] = entry
    return best


def verdict(one: Entry, other: Entry) -> str:
    """Why `one` ranks before `other`, in a few words."""
    (verified, bound, count, *_), (_, other_bound, other_count, *_) = one.strength, other.strength
    if verified != other.winner.verified:
        return "it is verified, the other is not"
    if bound != other_bound:
        return f"its speed-up is at least {bound:.4g}x, the other's {other_bound:.4g}x"
    if count != other_count:
        return f"the bounds are equal, but it has {count} samples, the other {other_count}"
    return "the bounds and samples are equal; the greater digest decides"


# Whether a measurement still holds: its hardware, software, kernel sources and conditions are compared with the current ones.

_DEVICES = {
    "device": "device {}",
    "target": "target {}",
    "count": "devices {}",
    "memory_gib": "memory {} GiB",
    "processors": "processors {}",
    "shared_memory": "shared memory {} bytes",
    "l2_bytes": "L2 {} bytes",
    "links": "links {}",
}
# The version of torch is not compared. If it matters, it is part of the name of the comm library.
_SOFTWARE = {"triton": "triton {}", "comm": "comm library {}"}
SOFTWARE = tuple(_SOFTWARE)
"""Fields of an Environment that decide whether a winner holds."""
_KERNELS = "kernel sources {}"
_DEPLOYED = {"launch": "mode {}", "l2": "L2 {}", "skew_us": "skew {:g} us"}


class Measured(Protocol):
    """A config of an operator that was measured: a trial, a winner, or a winner in the index of look-ups."""

    @property
    def op(self) -> str: ...
    @property
    def config(self) -> Config: ...
    @property
    def kernel_digest(self) -> str | None: ...


def same_kernel(measured: Measured) -> bool:
    """Whether the variant still has the kernel sources that were measured."""
    return measured.kernel_digest == variant_digest(measured.op, measured.config.variant)


def differences(measured: Measured, place: Place, here: Place) -> list[str]:
    """Compares the place of a measurement with the current one, field by field.

    Args:
        measured: Names the operator, the config and the digest of the kernel sources that were measured.
        place: Hardware, software and conditions of the measurement.
        here: Hardware, software and conditions of the call to be made.

    Returns:
        One text for each difference, for instance `triton 3.6.0 (here 3.7.1)`. Empty if the measurement holds here.
    """
    if place.hardware.backend != here.hardware.backend:  # no other field of the hardware is comparable
        devices = [f"measured on {place.hardware} (here {here.hardware})"]
    else:
        devices = _between_devices(place.hardware, here.hardware)
    sources = _difference(_KERNELS, measured.kernel_digest, variant_digest(measured.op, measured.config.variant))
    software = _fields(_SOFTWARE, place.software, here.software)
    return devices + sources + software + _fields(_DEPLOYED, place.conditions, here.conditions)


def holds(measured: Measured, place: Place, here: Place) -> bool:
    """Whether there are no `differences`. The kernel sources, whose digest takes long to compute, are compared last."""
    software = _fields(_SOFTWARE, place.software, here.software)
    elsewhere = software or not same_devices(place.hardware, here.hardware)
    return not (elsewhere or _fields(_DEPLOYED, place.conditions, here.conditions)) and same_kernel(measured)


def same_devices(hardware: Hardware, other: Hardware) -> bool:
    """Whether two descriptions of hardware agree in every field that decides speed."""
    return hardware.backend == other.backend and not _between_devices(hardware, other)


def _between_devices(hardware: Hardware, other: Hardware) -> list[str]:
    """The differences of two descriptions. If all GPUs of both hosts reach each other, their number and links do not count: a
    winner of two ranks on two GPUs holds for two ranks on eight.
    """
    if hardware.fully_linked and other.fully_linked:
        other = replace(other, count=hardware.count, links=hardware.links)
    return _fields(_DEVICES, hardware, other)


def _fields(texts: dict[str, str], place: object, here: object) -> list[str]:
    return [line for name, text in texts.items() for line in _difference(text, getattr(place, name), getattr(here, name))]


def _difference(text: str, value: object, here: object) -> list[str]:
    """`triton 3.6.0 (here 3.7.1)` from `triton {}`, or nothing if the values are equal."""
    return [f"{text.format(value)} (here {text[text.index('{') :].format(here)})"] if value != here else []


# Stale winners, for instance after an upgrade of Triton: look-ups ignore them, and `autotax refresh` measures them again.

MOST = 3
"""Configs of one problem that are proven again."""


@dataclass(frozen=True)
class Stale:
    """The former winners of one problem under the same deployed conditions, the best proven first."""

    problem: Problem
    conditions: Conditions
    """The conditions of the new measurement."""
    winners: tuple[WinnerRecord, ...]
    why: str
    """For instance `triton 3.6.0 (here 3.7.1)`; empty if the first winner holds here."""

    @property
    def configs(self) -> tuple[Config, ...]:
        """At most MOST configs, each once."""
        return tuple(dict.fromkeys(winner.config for winner in self.winners))[:MOST]

    @property
    def baselines(self) -> tuple[Config, ...]:
        """The bulk-synchronous configs that these winners were compared with, each once."""
        return tuple(dict.fromkeys(winner.baseline for winner in self.winners))[:MOST]


def stale_winners(
    winners: Iterable[WinnerRecord],
    here: Place,
    *,
    problems: Collection[Problem] | None = None,
    any_conditions: bool = False,
    everything: bool = False,
) -> list[Stale]:
    """The problems that have winners of the devices of `here`, none of which holds with the software of `here`.

    `problems` limits the answer to these; `any_conditions` includes winners of other conditions than those of `here`;
    `everything` includes problems whose winner holds.
    """
    groups: dict[tuple[Problem, Conditions], list[WinnerRecord]] = {}
    for winner in winners:
        requested = problems is None or winner.problem in problems
        deployed = winner.conditions.searched
        comparable = any_conditions or deployed == here.conditions.searched
        if requested and comparable and same_devices(winner.hardware, here.hardware):
            groups.setdefault((winner.problem, deployed), []).append(winner)
    stale = []
    for (problem, deployed), group in groups.items():
        conditions = deployed.proven if any_conditions else here.conditions
        place = Place(here.hardware, here.software, conditions)
        reasons = {id(winner): differences(winner, winner.place, place) for winner in group}
        if everything or all(reasons.values()):
            ranked = sorted(group, key=lambda winner: (bool(reasons[id(winner)]), -winner.interval_low, winner.config.digest))
            stale.append(Stale(problem, conditions, tuple(ranked), ", ".join(reasons[id(ranked[0])])))
    return stale
