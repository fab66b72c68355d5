"""IN FLIGHT: what is being measured is noted beforehand, so that the run after one that was killed knows what may have done it.

The notes are attributes of the Optuna study, one a run. Those of a run that could still end itself, however it did, say nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna

from autotax.config import Config

DEADLY = 2
"""A config that was in flight when so many runs in a row were killed is taken for what kills them."""
NOTE = "in flight in run "


class Flight:
    """The notes of one study, `run_id` being the run that goes on now. `statuses` are those of all runs by their ids: one that
    was killed is still `running`. `call` carries out what uses the database.
    """

    def __init__(self, study: optuna.Study, run_id: int, statuses: Mapping[int, str], call: Callable[..., Any]) -> None:
        self._study, self._run_id, self._call = study, run_id, call
        notes: dict[str, Any] = call(lambda: study.user_attrs)
        noted = {int(name.removeprefix(NOTE)): value for name, value in notes.items() if name.startswith(NOTE)}
        done = max((run for run in noted if statuses.get(run) == "done"), default=0)
        killed = [run for run in noted if done < run < run_id and statuses.get(run) == "running"]
        in_flight = (Config.from_dict(config) for run in killed for config in noted[run])
        self.deaths = Counter(config for config in in_flight if config.variant != "bsp")
        """Of how many runs in a row each config may have been the death, BSP excepted, without which nothing can be decided."""

    @property
    def deadly(self) -> list[Config]:
        return [config for config, deaths in self.deaths.items() if deaths >= DEADLY]

    def begin(self, configs: Sequence[Config]) -> None:
        """Notes that these are measured now, and nothing else any more."""
        self._call(self._study.set_user_attr, f"{NOTE}{self._run_id}", [config.to_dict() for config in configs])
