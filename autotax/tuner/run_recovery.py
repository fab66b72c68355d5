"""LAST WORDS of runs whose database did not take them, being locked, full or gone: small files that the next run reads into it.

Without them a run that the database ended would look like one that was killed.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import platformdirs

from autotax.core.config import Config
from autotax.core.settings import ENDINGS
from autotax.db.url import identity, sqlite_path


def leave(url: str, run_id: int, status: str) -> None:
    """Notes how a run ended. A full disk may refuse that too; then the run is taken for killed."""
    place = _place(url)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_name(f"{place.name}.run-{run_id}.{status}").touch()  # empty, for which a full disk often has room


def left(url: str) -> list[tuple[Path, int, str]]:
    """The files that are there, each with the run and the status that it tells."""
    place = _place(url)
    named = re.compile(re.escape(place.name) + rf"\.run-(\d+)\.({'|'.join(ENDINGS)})")
    matches = [(path, named.fullmatch(path.name)) for path in place.parent.glob("*.run-*.*")]
    return [(path, int(match[1]), match[2]) for path, match in matches if match]


def _place(url: str) -> Path:
    """Beside a SQLite file; of a server in the user's data folder, where the runs of this machine find it."""
    return sqlite_path(url) or platformdirs.user_data_path("autotax") / identity(url)


# IN FLIGHT: what is being measured is noted beforehand, so that the run after one that was killed knows what may have done it.

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
