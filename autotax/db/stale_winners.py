"""STALE winners that an upgrade left behind: the same devices, other software. They do not answer, and can be proven again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db.records import WinnerRecord
from autotax.db.staleness import Place
from autotax.digests import variant_digest
from autotax.hardware import Hardware

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
