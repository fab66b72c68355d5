"""Messages of a command on stderr, one line each, beside its table or document."""

from __future__ import annotations

import math
import shutil
import sys

from autotax.core.terminal import NARROWEST, printable

INTERRUPTED = 130
"""The exit code of an interrupted command, which shells know."""


class Failed(Exception):
    """The command could not do its work, though its input was good; exit code 1. The message is one line."""

    code = 1


class Interrupted(Failed):
    """Ctrl-C or a signal ended the command."""

    code = INTERRUPTED


def say(message: str, code: int = 0) -> int:
    """Prints one line on stderr, without the line breaks of the message, and returns `code`. A terminal gets lines that end
    between words.
    """
    line = " ".join(f"autotax: {printable(message)}".split())
    if sys.stderr is not None and sys.stderr.isatty():
        line = "\n".join(folded(line, max(NARROWEST, shutil.get_terminal_size().columns)))
    print(line, file=sys.stderr)
    return code


def folded(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, of words that are never broken. A command stands in backticks or behind `next:`. Its
    lines end with a backslash, so a shell takes the copied lines.
    """
    lines, quotes, following = [""], 0, math.inf
    for place, word in enumerate(text.split()):
        command = place > following or quotes % 2 == 1
        begins = place == following or word.startswith("`")
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) + 2 * (command or begins) > width:
            lines[-1] += " \\" * command
            lines.append("  " + word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
        quotes += word.count("`")
        following = place + 1 if word == "next:" else following
    return lines


def closing(url: str, following: str) -> None:
    """Prints the last line of a command that stored something: the database and the next step."""
    from autotax.db.url import shown

    say(f"stored in {shown(url)}; next: {following}")


def public_url(url: str) -> str:
    """The URL of a database without its secrets."""
    from sqlalchemy import make_url

    from autotax.db.url import public

    return public(make_url(url))
