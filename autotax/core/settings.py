"""Statuses of trials and runs, and the settings of a tuning run."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.hardware import Hardware

INVALIDITY = {
    "ok": "correct",
    "pruned": "correct",
    "infeasible": "constraints",
    "compile_error": "compile",
    "wrong_result": "correctness",
    "hang": "timeout",
    "out_of_resources": "runtime",
    "crash": "runtime",
}
"""The name of each status of a trial in T4, the results format of the auto-tuning community (`results/search/landscapes.py`),
from harmless to grave. If the ranks differ, the gravest status is the status of the trial. Statuses of ranks that stopped early
are the gravest, because their peers then time out or read data that was never written.
"""
TRIAL_STATUSES = tuple(INVALIDITY)
RUN_STATUSES = ("running", "done", "interrupted", "failed")
ENDINGS = RUN_STATUSES[1:]


OFF = ("", "0", "false", "f", "no", "n", "off")
"""Values of an environment variable that is a switch and off."""


def is_on(variable: str) -> bool:
    """Whether an environment variable that is a switch is on."""
    return os.environ.get(variable, "").strip().lower() not in OFF


# Settings of a tuning run.

SAMPLERS = ("tpe", "random", "gp")
EFFORTS: dict[str, tuple[int, float | None]] = {"quick": (24, 0.015), "normal": (60, 0.007), "full": (300, None)}
"""The most trials of each effort, and its value of `Settings.ends_below`."""
GPU_SOAK, CPU_SOAK = 2000, 20
"""Replays that a finalist must pass. The interpreter is slow, so CPU ranks run only a few."""


@dataclass(frozen=True)
class Settings:
    """How to search. The budget is `trials` measured configs (those of earlier runs count on resume) or `timeout_s` seconds."""

    trials: int = 60
    timeout_s: float | None = None
    ends_below: float | None = None
    """The search ends when eight more trials should gain less than this share; None: never. Only sampler `gp` estimates it."""
    sampler: str | None = None
    """None: `gp` if there is a trained prior for the operator and the devices, else `tpe`."""
    seed: int = 0
    paired: bool = False
    """Whether each trial is measured in one job with the incumbent: finer figures, in about twice the time."""
    resume: bool = True
    variants: tuple[str, ...] | None = None
    conditions: Conditions | None = None
    """None: as usual on the machine."""
    soak: int | None = None
    """Replays with delayed ranks and changing inputs that a finalist must pass; 0: none, None: as usual on the machine."""
    host: str | None = None
    """The host name that runs store; None: the name of the machine."""
    proof: bool = False
    """Whether the run proves former winners without a search."""

    def __post_init__(self) -> None:
        if type(self.trials) is not int:
            raise UsageError(f"trials is {self.trials!r}; it must be a whole number: give another --trials")
        if self.trials < 1:
            raise UsageError(f"trials is {self.trials}; it must be at least 1: give another --trials")
        if self.ends_below is not None and not 0 < self.ends_below < 1:
            raise UsageError(f"ends_below is {self.ends_below}; it must be a share between 0 and 1: give another, or an effort")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"timeout is {self.timeout_s} s; it must be positive: give another --timeout")
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise UsageError(f"sampler is {self.sampler!r}; allowed are {', '.join(SAMPLERS)}: give one of these as --sampler")
        if self.soak is not None and self.soak < 0:
            raise UsageError(f"soak is {self.soak}; it must be 0 (none) or more: give another --soak")

    @classmethod
    def of_effort(cls, effort: str | None, trials: int | None = None, **others: Any) -> Settings:
        """The settings of an effort, with `trials` in the place of its number. Without an effort, they are those of `normal`, or
        all of `trials`. Raises UsageError for an effort that is not in EFFORTS.
        """
        if effort is None and trials is not None:
            return cls(trials=trials, **others)
        effort = "normal" if effort is None else effort
        if effort not in EFFORTS:
            raise UsageError(f"effort is {effort!r}; allowed are {', '.join(EFFORTS)}: give one of these as --effort")
        usual, ends_below = EFFORTS[effort]
        return cls(trials=usual if trials is None else trials, ends_below=ends_below, **others)

    def on(self, hardware: Hardware) -> Settings:
        """These settings with the machine's defaults filled in. Raises UsageError for conditions that it does not support."""
        usual_soak = GPU_SOAK if hardware.on_gpu else CPU_SOAK
        return replace(
            self,
            conditions=as_deployed(self.conditions, hardware),
            soak=usual_soak if self.soak is None else self.soak,
        )

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {
            "variants": list(self.variants) if self.variants else None,
            "conditions": self.conditions.to_dict() if self.conditions else None,
            "host": self.host or socket.gethostname(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`, without the host, which is the machine that uses the settings."""
        variants, conditions = data["variants"], data["conditions"]
        return cls(
            **{name: data[name] for name in ("trials", "timeout_s", "sampler", "seed", "resume", "soak")},
            ends_below=data.get("ends_below"),
            paired=data.get("paired", False),
            variants=tuple(variants) if variants else None,
            conditions=Conditions.from_dict(conditions) if conditions else None,
        )


def as_deployed(conditions: Conditions | None, hardware: Hardware) -> Conditions:
    """These conditions, or the usual ones. Raises UsageError for conditions that CPU ranks do not support."""
    default = Conditions.usual(hardware.on_gpu)
    if conditions is None or hardware.on_gpu:
        return conditions or default
    if conditions.mode == "graph":
        raise UsageError(f"mode is {conditions.mode!r}; CPU ranks have {default.mode} calls and in-place: leave --mode out")
    if conditions.l2 != default.l2:
        raise UsageError(f"l2 is {conditions.l2!r}; CPU ranks have no L2 and are recorded as {default.l2}: leave --l2 out")
    return conditions
