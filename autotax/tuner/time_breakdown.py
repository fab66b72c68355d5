"""Where the time of a run went: on the devices, compiling, in the ranks' other work, in the tuner and its database."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotax.runner.measurement import Measurement


@dataclass
class Accounts:
    """Kept while a run goes on. The search ends when `search_ended` is called; what follows is the finalists'."""

    started: float = field(default_factory=time.monotonic)
    trials: int = 0
    """Trials of this run that were verified, timed and stored."""
    device_s: float = 0.0
    compile_s: float = 0.0
    measuring_s: float = 0.0
    search_s: float | None = None
    gain: float | None = None
    """What eight more trials were expected to win when the search ended, as a share; None where no model told."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def note(self, measurements: Sequence[Measurement], seconds: float, meanwhile_s: float = 0.0) -> None:
        """Notes one job of the runner, how long its answer took, and how long what the tuner did meanwhile: where that outlasts
        the ranks' work, as when the database is locked, it is not they who took so long.
        """
        self.measuring_s += seconds - max(0.0, meanwhile_s - sum(m.ranks_s for m in measurements))
        self.device_s += sum(m.device_s for m in measurements)
        self.compile_s += sum(m.compile_s for m in measurements)

    def search_ended(self) -> None:
        self.search_s = self.seconds

    def told(self) -> dict[str, float]:
        """As stored and shown. `seconds`, `idle_share` (of the devices) and the four parts are of the whole run, finalists
        included; `trials` and `trials_per_minute` are of `search_s`, the search alone.
        """
        seconds = self.seconds
        told = {} if self.gain is None else {"gain": self.gain}
        search_s = seconds if self.search_s is None else self.search_s
        return told | {
            "device_s": self.device_s,
            "compile_s": self.compile_s,
            "ranks_s": max(0.0, self.measuring_s - self.device_s - self.compile_s),
            "tuner_s": max(0.0, seconds - self.measuring_s),
            "seconds": seconds,
            "idle_share": max(0.0, 1 - self.device_s / seconds) if seconds else 0.0,
            "trials": self.trials,
            "search_s": search_s,
            "trials_per_minute": self.trials / search_s * 60 if search_s else 0.0,
        }
