"""Messages of a command on stderr, one line each, beside its table or document."""

from __future__ import annotations

import sys

from autotax.core.terminal import printable

INTERRUPTED = 130
"""The exit code of an interrupted command, which shells know."""


class Failed(Exception):
    """The command could not do its work, though its input was good; exit code 1. The message is one line."""

    code = 1


class Interrupted(Failed):
    """Ctrl-C or a signal ended the command."""

    code = INTERRUPTED


def say(message: str, code: int = 0) -> int:
    """Prints one line on stderr, without the line breaks of the message, and returns `code`."""
    print(f"autotax: {' '.join(printable(message).split())}", file=sys.stderr)
    return code


def closing(url: str, following: str) -> None:
    """Prints the last line of a command that stored something: the database and the next step."""
    from autotax.db.url import shown

    say(f"stored in {shown(url)}; next: {following}")


def public_url(url: str) -> str:
    """The URL of a database without its secrets."""
    from sqlalchemy import make_url

    from autotax.db.url import public

    return public(make_url(url))
