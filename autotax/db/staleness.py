"""Whether a measurement still holds: compares its hardware, software, kernel sources and conditions with the current ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db.records import Place, WinnerRecord
from autotax.hardware import Hardware
from autotax.operators.registry import variant_digest

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
        devices = _fields(_DEVICES, place.hardware, here.hardware)
    sources = _difference(_KERNELS, measured.kernel_digest, variant_digest(measured.op, measured.config.variant))
    software = _fields(_SOFTWARE, place.software, here.software)
    return devices + sources + software + _fields(_DEPLOYED, place.conditions, here.conditions)


def holds(winner: WinnerRecord, here: Place) -> bool:
    """Whether a look-up in this place may answer with the winner: all facts that decide its speed are equal."""
    return not differences(winner, winner.place, here)


def same_devices(hardware: Hardware, other: Hardware) -> bool:
    """Whether two descriptions of hardware agree in every field that decides speed."""
    return hardware.backend == other.backend and not _fields(_DEVICES, hardware, other)


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
    """The former winners of one problem and the same deployed conditions, the best proven first, and the differences to this
    place.
    """

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
