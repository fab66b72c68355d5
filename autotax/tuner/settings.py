"""What a tuning run is told to do."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotax.conditions import Conditions
from autotax.errors import UsageError
from autotax.hardware import Hardware

SAMPLERS = ("tpe", "random", "gp")
GPU_SOAK, CPU_SOAK = 2000, 20
"""Replays that a finalist must pass; the interpreter is slow, so on CPU ranks a few must do."""


@dataclass(frozen=True)
class Settings:
    """How to search. The budget is `trials` measured configs (those of earlier runs count on resume) or `timeout_s` seconds."""

    trials: int = 60
    timeout_s: float | None = None
    sampler: str = "tpe"
    seed: int = 0
    resume: bool = True
    variants: tuple[str, ...] | None = None
    conditions: Conditions | None = None
    """None: as usual on the machine."""
    soak: int | None = None
    """Replays with delayed ranks and changing inputs that a finalist must pass; 0: none, None: as usual on the machine."""
    host: str | None = None
    """Under which name runs note where they were measured; None: that of the machine."""

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UsageError(f"trials is {self.trials}; it must be at least 1: give another --trials")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"timeout is {self.timeout_s} s; it must be positive: give another --timeout")
        if self.sampler not in SAMPLERS:
            raise UsageError(f"sampler is {self.sampler!r}; allowed are {', '.join(SAMPLERS)}: give one of these as --sampler")
        if self.soak is not None and self.soak < 0:
            raise UsageError(f"soak is {self.soak}; it must be 0 (none) or more: give another --soak")

    def on(self, hardware: Hardware) -> Settings:
        """The same with what is left to the machine filled in. Raises UsageError for conditions that it does not know."""
        usual_soak = GPU_SOAK if hardware.on_gpu else CPU_SOAK
        return replace(
            self,
            conditions=as_deployed(self.conditions, hardware),
            soak=usual_soak if self.soak is None else self.soak,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "trials": self.trials,
            "timeout_s": self.timeout_s,
            "sampler": self.sampler,
            "seed": self.seed,
            "resume": self.resume,
            "variants": list(self.variants) if self.variants else None,
            "conditions": self.conditions.to_dict() if self.conditions else None,
            "soak": self.soak,
            "host": self.host or socket.gethostname(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`, but for the host: that is wherever the settings are used."""
        variants, conditions = data["variants"], data["conditions"]
        return cls(
            **{name: data[name] for name in ("trials", "timeout_s", "sampler", "seed", "resume", "soak")},
            variants=tuple(variants) if variants else None,
            conditions=Conditions.from_dict(conditions) if conditions else None,
        )


def as_deployed(conditions: Conditions | None, hardware: Hardware) -> Conditions:
    """These conditions, or the usual ones. Raises UsageError for what CPU ranks do not know."""
    usual = Conditions.usual(hardware.on_gpu)
    if conditions is None or hardware.on_gpu:
        return conditions or usual
    if conditions.mode != usual.mode:
        raise UsageError(f"mode is {conditions.mode!r}; CPU ranks know {usual.mode} calls only: take --mode out")
    if conditions.l2 != usual.l2:
        raise UsageError(f"l2 is {conditions.l2!r}; CPU ranks know no L2, which is told as {usual.l2}: take --l2 out")
    return conditions
