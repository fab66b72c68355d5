"""Rank processes that wait for a group to be lost: they have imported what takes seconds, and know no rank and no device yet.

They only save time. Whoever finds none starts the ranks anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from autotax.runner.child import Child


@dataclass
class Spares:
    """Processes of one group, all started at the same time."""

    _children: list[Child] = field(default_factory=list)

    def start(self, count: int, process: Callable[[], Child]) -> None:
        """As many as can be had: a full disk or a limit of processes is met, and told, by who cannot do without."""
        with suppress(OSError):
            while len(self._children) < count:
                self._children.append(process())

    def take(self, count: int) -> list[Child]:
        """The processes of a whole group, which are the caller's from now on; else none, and no spare is left.

        A group of spares and new processes would be up no sooner than one of new ones, and might run other sources than
        its spares, which have imported those of their time.
        """
        if len(self._children) == count and all(child.process.poll() is None for child in self._children):
            taken, self._children = self._children, []
            return taken
        self.close()
        return []

    def close(self) -> None:
        """Ends them all; safe to call twice."""
        for child in self._children:
            child.stop()
        for child in self._children:
            child.kill()
        self._children = []
