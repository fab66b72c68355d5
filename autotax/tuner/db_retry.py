"""A database that is busy is waited for; one that is gone ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from autotax.db import DatabaseBusy

LONGEST_WAIT_S = 600.0
"""How long a database may stay locked beyond its own timeout before a run ends."""
PAUSE_S = 0.2
WAITING = "the database is kept locked by another process; waiting"

P = ParamSpec("P")
R = TypeVar("R")


class Patience:
    """Calls again what found the database busy, until it succeeds or LONGEST_WAIT_S have passed; says so by `notice`."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function returns. Raises what it raises: DatabaseBusy after LONGEST_WAIT_S only."""
        since = time.monotonic()
        while True:
            try:
                return function(*args, **kwargs)
            except DatabaseBusy:
                if time.monotonic() - since > LONGEST_WAIT_S:
                    raise
                self._notice(WAITING)
                time.sleep(PAUSE_S)
