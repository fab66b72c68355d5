"""STALE OR NOT: in what the place where a winner was measured differs from the place where it is to run, field by field."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db.records import WinnerRecord
from autotax.hardware import Hardware
from autotax.operators.registry import variant_digest
from autotax.software import Environment

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
# Of torch itself nothing is asked: where it matters it is part of the name of the comm library.
_SOFTWARE = {"triton": "triton {}", "comm": "comm library {}"}
_KERNELS = "kernel sources {}"
_DEPLOYED = {"launch": "mode {}", "l2": "L2 {}", "skew_us": "skew {:g} us"}


@dataclass(frozen=True)
class Place:
    """Where and how a config runs, or ran when it was measured."""

    hardware: Hardware
    software: Environment
    conditions: Conditions

    def differences(self, here: Place, kernels: tuple[str, str]) -> list[str]:
        """What differs `here`, for instance `triton 3.6.0 (here 3.7.1)`; empty if what was measured in this place holds.

        `kernels` are the digests of the sources of what was measured: as it was measured, and here.
        """
        if self.hardware.backend != here.hardware.backend:  # then everything is another, and this says it all
            devices = [f"measured on {self.hardware} (here {here.hardware})"]
        else:
            devices = _fields(_DEVICES, self.hardware, here.hardware)
        sources = _told(_KERNELS, *kernels)
        software = _fields(_SOFTWARE, self.software, here.software)
        return devices + sources + software + _fields(_DEPLOYED, self.conditions, here.conditions)

    def like(self, here: Place) -> bool:
        """Whether the devices are alike, whatever else differs."""
        return self.hardware.backend == here.hardware.backend and not _fields(_DEVICES, self.hardware, here.hardware)


def _fields(named: dict[str, str], there: object, here: object) -> list[str]:
    return [line for name, spelled in named.items() for line in _told(spelled, getattr(there, name), getattr(here, name))]


def _told(spelled: str, there: object, here: object) -> list[str]:
    return [f"{spelled.format(there)} (here {_bare(spelled, here)})"] if there != here else []


def _bare(spelled: str, value: object) -> str:
    """The value without the name before it."""
    return spelled[spelled.index("{") :].format(value)


# STALE winners that an upgrade left behind: the same devices, other software. They do not answer, and can be proven again.

MOST = 3
"""Configs of one problem that are proven again."""


@dataclass(frozen=True)
class Stale:
    """The former winners of one problem, of calls that are deployed alike, best proven first, and what differs here."""

    problem: Problem
    conditions: Conditions
    """Those of the new proof."""
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


def differences(winner: WinnerRecord, here: Place) -> list[str]:
    """What differs here from where a winner was measured; empty if the winner holds."""
    there = Place(winner.hardware, winner.environment, winner.conditions)
    return there.differences(here, (winner.kernel_digest, variant_digest(winner.problem.op, winner.config.variant)))


def alike(winner: WinnerRecord, hardware: Hardware) -> bool:
    """Whether a winner was measured on devices like these."""
    there = Place(winner.hardware, winner.environment, winner.conditions)
    return there.like(Place(hardware, winner.environment, winner.conditions))


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
    found: dict[tuple[Problem, Conditions], list[WinnerRecord]] = {}
    for winner in winners:
        wanted = problems is None or winner.problem in problems
        deployed = winner.conditions.searched
        if wanted and alike(winner, here.hardware) and (any_conditions or deployed == here.conditions.searched):
            found.setdefault((winner.problem, deployed), []).append(winner)
    stale = []
    for (problem, deployed), group in found.items():
        conditions = deployed.proven if any_conditions else here.conditions
        place = Place(here.hardware, here.software, conditions)
        told = {id(winner): differences(winner, place) for winner in group}
        if everything or all(told.values()):
            ranked = sorted(group, key=lambda winner: (bool(told[id(winner)]), -winner.interval_low, winner.config.digest))
            stale.append(Stale(problem, conditions, tuple(ranked), ", ".join(told[id(ranked[0])])))
    return stale
