"""STALE OR NOT: in what the place where a winner was measured differs from the place where it is to run, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from autotax.core.conditions import Conditions
from autotax.hardware import Environment, Hardware

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
