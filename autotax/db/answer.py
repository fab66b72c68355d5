"""What a look-up answers."""

from __future__ import annotations

from dataclasses import dataclass

from autotax.core.config import Config


@dataclass(frozen=True, eq=False)
class Answer(Config):
    """A config, and how it was come by. It equals, hashes and serialises as the Config that it is."""

    match: str = "fallback"
    """exact, nearest, stale (only if allowed) or fallback."""
    from_problem: str | None = None
    """Key of the problem whose winner this is; None for a fallback."""
    reason: str = ""
    """One line."""
    passed_over: bool = False
    """Whether there are winners of this very problem on such devices, none of which holds and fits: then the reason says why."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return (self.variant, self.params) == (other.variant, other.params)

    __hash__ = Config.__hash__
