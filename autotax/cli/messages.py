"""Lines that commands print beside tables and documents: messages on stderr, one line each. Closed, full and broken streams.

A command fails with one line if it cannot write its answer to stdout. Messages that stderr refuses are dropped.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from autotax.core.terminal import NARROWEST, printable

INTERRUPTED = 130
"""The exit code of an interrupted command, which shells know."""


class Failed(Exception):
    """The command could not do its work, though its input was good; exit code 1. The message is one line."""

    code = 1


class Interrupted(Failed):
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


# Standard streams.

LOST = {
    errno.ENOSPC: "no space is left where the answer goes: make room, or send it elsewhere",
    errno.EDQUOT: "no space is left where the answer goes: make room, or send it elsewhere",
    errno.EPIPE: "nobody reads the answer any more: whatever it was sent to has ended",
}
CLOSED = "stdout is closed, and the answer goes there: open it, or send it to /dev/null"


class Forgiving:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            drain(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            drain(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def forgiving_stderr() -> Iterator[None]:
    """A context in which writes to stderr never fail."""
    if sys.stderr is None:  # print(file=None) would write to stdout
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
            yield
        return
    with redirect_stderr(Forgiving(sys.stderr)):
        yield


def hold_the_first_three() -> None:
    """Opens file descriptors 0, 1 and 2 if they are closed.

    Otherwise the next opened file, even a database, would get such a number and receive printed output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a character


def deliver() -> None:
    """Flushes stdout. Raises OSError on failure; without this call Python would print a traceback later."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drain(stream: TextIO | None) -> None:
    """Redirects a stream that has failed, and its buffered text, to the null device."""
    with suppress(OSError, ValueError, AttributeError):
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
