"""IN FLIGHT: what is being measured is noted beforehand, so that the run after one that was killed knows what may have done it.

The notes are attributes of the Optuna study, one a run. Those of a run that could still end itself, however it did, say nothing,
nor do those of one that may be going on: several tuners may share a database, and a study. Each signs its notes.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from autotax.core.config import Config

DEADLY = 2
"""A config that was in flight when so many runs in a row were killed is taken for what kills them."""
NOTE = "in flight in run "
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Flight:
    """The notes of one study, `run_id` being the run that goes on now. `statuses` are those of all runs by their ids: one that
    was killed is still `running`, and its process is gone. `call` carries out what uses the database.
    """

    def __init__(self, study: optuna.Study, run_id: int, statuses: Mapping[int, str], call: Callable[..., Any]) -> None:
        self._study, self._run_id, self._call = study, run_id, call
        notes: dict[str, Any] = call(lambda: study.user_attrs)
        noted = {int(name.removeprefix(NOTE)): value for name, value in notes.items() if name.startswith(NOTE)}
        done = max((run for run in noted if statuses.get(run) == "done"), default=0)
        cut = [noted[run] for run in noted if done < run < run_id and statuses.get(run) == "running"]
        in_flight = (Config.from_dict(config) for note in cut if not _may_go_on(note["by"]) for config in note["configs"])
        self.deaths = Counter(config for config in in_flight if config.variant != "bsp")
        """Of how many runs in a row each config may have been the death, BSP excepted, without which nothing can be decided."""

    @property
    def deadly(self) -> list[Config]:
        return [config for config, deaths in self.deaths.items() if deaths >= DEADLY]

    def begin(self, configs: Sequence[Config]) -> None:
        """Notes that these are measured now, and nothing else any more."""
        note = {"by": _me(), "configs": [config.to_dict() for config in configs]}
        self._call(self._study.set_user_attr, f"{NOTE}{self._run_id}", note)


def _me() -> list[Any]:
    """This process, as others know it: its host, since when that is up, its number."""
    return [socket.gethostname(), BOOT.read_text().strip() if BOOT.exists() else "", os.getpid()]


def _may_go_on(by: Sequence[Any]) -> bool:
    """Whether the process that began an earlier run may still be at it. Of another host nobody here can tell."""
    (host, boot, number), (here, since, mine) = by, _me()
    if host != here:
        return True
    if boot != since or number == mine:  # whoever begins another run has left the one before
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and somebody else's
        pass
    return True
