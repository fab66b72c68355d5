"""Errors that the user can mend. Each message is one line that says what happened and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """Bad input: what was given, what is allowed, what to do. Commands exit with code 2, and nothing is stored."""


class MachineError(RuntimeError):
    """The machine fails for every config: a full disk, a database that can no longer be written.

    No config causes it, so it is never stored as the outcome of a config. Commands exit with code 1; the same command goes on
    later.
    """


# Suggestions for mistyped names.

def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`did you mean push?`, or nothing if no allowed name is close."""
    close = get_close_matches(word, list(allowed), n=1)
    return f"did you mean {close[0]}?" if close else ""
