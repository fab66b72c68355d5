"""Marker files with a run's end status, written when the database was locked, full or gone. The next run stores their content.

Without them, a run that a database error ended would look like a killed run.
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
    """Writes the end status of a run to a marker file. If a full disk refuses that too, the run counts as killed."""
    place = _place(url)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_name(f"{place.name}.run-{run_id}.{status}").touch()  # a full disk often has room for an empty file


def left(url: str) -> list[tuple[Path, int, str]]:
    """The existing marker files, each with its run id and status."""
    place = _place(url)
    pattern = re.compile(re.escape(place.name) + rf"\.run-(\d+)\.({'|'.join(ENDINGS)})")
    matches = [(path, pattern.fullmatch(path.name)) for path in place.parent.glob("*.run-*.*")]
    return [(path, int(match[1]), match[2]) for path, match in matches if match]


def _place(url: str) -> Path:
    """Prefix of the marker files: next to a SQLite file, or for a server in the user's data folder, where later runs of this
    machine find them.
    """
    return sqlite_path(url) or platformdirs.user_data_path("autotax") / identity(url)


# Configs in flight. Each config is noted before it is measured, so that the next run knows which config may have killed the
# previous one.

DEADLY = 2
"""A config that was in flight when this many runs in a row were killed is assumed to kill them."""
NOTE = "in flight in run "
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Flight:
    """The notes of one study. `run_id` is the current run. `statuses` has the status of all runs by id: a killed run is still
    `running`, but its process is gone. `call` executes functions that use the database.
    """

    def __init__(self, study: optuna.Study, run_id: int, statuses: Mapping[int, str], call: Callable[..., Any]) -> None:
        self._study, self._run_id, self._call = study, run_id, call
        notes: dict[str, Any] = call(lambda: study.user_attrs)
        noted = {int(name.removeprefix(NOTE)): value for name, value in notes.items() if name.startswith(NOTE)}
        done = max((run for run in noted if statuses.get(run) == "done"), default=0)
        cut = [noted[run] for run in noted if done < run < run_id and statuses.get(run) == "running"]
        in_flight = (Config.from_dict(config) for note in cut if not _may_go_on(note["by"]) for config in note["configs"])
        self.deaths = Counter(config for config in in_flight if config.variant != "bsp")
        """Counts consecutive killed runs during which a config was being measured. BSP is excluded, because every decision needs
        it.
        """

    @property
    def deadly(self) -> list[Config]:
        return [config for config, deaths in self.deaths.items() if deaths >= DEADLY]

    def begin(self, configs: Sequence[Config]) -> None:
        """Notes the configs that are measured from now on; replaces the previous note."""
        note = {"by": this_process(), "configs": [config.to_dict() for config in configs]}
        self._call(self._study.set_user_attr, f"{NOTE}{self._run_id}", note)


def this_process() -> list[Any]:
    """Identifies this process: its host, the boot id of the host, its process id."""
    return [socket.gethostname(), BOOT.read_text().strip() if BOOT.exists() else "", os.getpid()]


def _may_go_on(by: Sequence[Any]) -> bool:
    """Whether the process of an earlier run may still be alive. Processes of other hosts cannot be checked, so they count as
    alive.
    """
    (host, boot, number), (here, since, mine) = by, this_process()
    if host != here:
        return True
    if boot != since or number == mine:  # a process that begins another run has ended its earlier one
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        pass
    return True
