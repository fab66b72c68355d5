"""What a command says beside its table or document: one line on stderr at a time."""

from __future__ import annotations

import sys

from autotax.core.terminal import printable


class Failed(Exception):
    """The command could not do its work, though its input was good; exit code 1. The message is one line."""


def say(message: str, code: int = 0) -> int:
    """One line on stderr, whatever the message holds; gives `code`."""
    print(f"autotax: {' '.join(printable(message).split())}", file=sys.stderr)
    return code
