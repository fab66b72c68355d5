"""Handling of closed, full and broken standard streams.

A command fails with one line if it cannot write its answer to stdout. Messages that stderr refuses are dropped.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

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
