"""Errors of kernels as text: a line with the message and the place, then the traceback."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

LONGEST, LONGEST_TRACEBACK = 600, 4000
MARK = "\nTraceback (most recent call last):\n"
PACKAGE = Path(__file__).parents[1]
FOREIGN = re.compile(r"/(site-packages|dist-packages|lib/python3[^/]*)/|^<")
"""Files of which an author of kernels is not the author."""


def described(error: BaseException) -> str:
    """`NameError: name 'x' is not defined (push.py:32)`, and the traceback from its first foreign frame on."""
    places = list(_places(error))
    own = [place for place in places if not FOREIGN.search(place[0]) and PACKAGE not in Path(place[0]).parents]
    kernels = [place for place in places if PACKAGE / "kernels" in Path(place[0]).parents]
    file, line = _in_kernel(error) or (own or kernels or [("", 0)])[-1]
    where = f" ({Path(file).name}:{line})" if file else ""
    told = "".join(traceback.format_exception(error)).partition(MARK.lstrip("\n"))[2]
    return f"{type(error).__name__}: {str(error)[-LONGEST:]}{where}{MARK}{told.rstrip()[-LONGEST_TRACEBACK:]}"


def summary(text: str) -> str:
    """The text of an error on one line, without its traceback."""
    return " ".join(text.partition(MARK)[0].split())


def joined(errors: Iterable[str]) -> str:
    """Several errors as one: all messages, and the traceback of the first error that has one."""
    parts = [text.partition(MARK) for text in dict.fromkeys(errors)]
    told = next((mark + rest for _, mark, rest in parts if mark), "")
    return "; ".join(dict.fromkeys(message for message, _, _ in parts)) + told


def _frames(error: BaseException | None) -> Iterator[TracebackType]:
    """The frames of an error, after those of its causes."""
    if error is None:
        return
    yield from _frames(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
    at = error.__traceback__
    while at:
        yield at
        at = at.tb_next


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    """File and line of each frame. The frames of the first cause come last, because they say most."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    for each in chain:
        for frame in traceback.extract_tb(each.__traceback__):
            yield frame.filename, frame.lineno or 0


def _in_kernel(error: BaseException) -> tuple[str, int] | None:
    """File and line of an error of Triton's compiler, which knows its line from the `def` on, and no file."""
    source, line = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", None)
    if not isinstance(source, str) or not isinstance(line, int):
        return None
    for frame in _frames(error):
        for kernel in list(frame.tb_frame.f_globals.values()):
            if getattr(kernel, "src", None) == source and (function := getattr(kernel, "fn", None)):
                lines, first = inspect.getsourcelines(function)
                before = next(at for at, text in enumerate(lines) if text.lstrip().startswith("def "))
                return function.__code__.co_filename, first + before + line - 1
    return None
