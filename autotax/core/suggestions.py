"""What a user may have meant by a name that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`did you mean push?`, or nothing if no allowed name is close."""
    close = get_close_matches(given, list(allowed), n=1)
    return f"did you mean {close[0]}?" if close else ""
