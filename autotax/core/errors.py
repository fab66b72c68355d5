"""What can go wrong in a way that the user can mend. Each message is one line: what happened, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """Bad input: what was given, what is allowed, what to do. Commands exit with code 2, and nothing is stored."""


class MachineError(RuntimeError):
    """The machine lets a run down, whatever config is tried: a full disk, a database that cannot be written any more.

    It is no config's fault and is never stored as one's outcome. Commands exit with code 1; the same command goes on later.
    """


# What a user may have meant by a name that there is not.

def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`did you mean push?`, or nothing if no allowed name is close."""
    close = get_close_matches(given, list(allowed), n=1)
    return f"did you mean {close[0]}?" if close else ""
