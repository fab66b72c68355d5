"""Errors that the user can mend. Each message is one line that says what happened and what to do."""

from __future__ import annotations

import errno
import inspect
import re
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType


class UsageError(ValueError):
    """Bad input: what was given, what is allowed, what to do. Commands exit with code 2, and nothing is stored."""


class MachineError(RuntimeError):
    """The machine fails for every config, as with a full disk: no config's outcome. Commands exit with 1 and may go on later."""


# Limits of the machine, which any line of a program may meet.

FILES = "raise the limit, for instance with `ulimit -n 1024`, then run the same command"
RANKS_KIB = 2_000_000
"""The least limit of `ulimit -v` with which two CPU ranks run. Ranks of GPUs need more."""
LIMITS = {
    errno.EMFILE: FILES,
    errno.ENFILE: "close other programs, then run the same command",
    errno.EAGAIN: "end other processes or raise `ulimit -u`, then run the same command",
}
"""Errors of the operating system that say that a limit is met, each with its remedy."""
INSTALL = "install autotax again, with what it needs (`pip install autotax`), then run the same command"


def memory_kib() -> int | None:
    """The limit of the virtual memory of this process, in KiB: `ulimit -v`. None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft >> 10


def out_of_memory() -> str:
    """One line about memory that this process did not get."""
    kib = memory_kib()
    if kib is None:
        return "the memory is at its limit: free memory, then run the same command"
    return f"the memory is at its limit: `ulimit -v` is {kib}, two CPU ranks need {RANKS_KIB}, GPUs more: raise it"


def limit_met(error: BaseException) -> str | None:
    """One line about the limit (files, memory, processes) or the missing installation that caused an error; None if none did."""
    scarce = (memory_kib() or RANKS_KIB) < RANKS_KIB
    for cause in causes(error):
        if scarce and isinstance(cause, ImportError | SystemError) and not isinstance(cause, ModuleNotFoundError):
            return out_of_memory()  # a library could not be loaded, or an import forgot its error
        if isinstance(cause, MemoryError) or "failed to map segment" in str(cause):  # the dynamic linker's words
            return out_of_memory()
        if isinstance(cause, ImportError):
            last = next((line for line in reversed(str(cause).splitlines()) if line), "no reason")
            return f"{cause.name or 'a module'} cannot be imported ({last[:300]}): {INSTALL}"
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return out_of_memory()
        if isinstance(cause, OSError) and cause.errno in LIMITS:
            return f"the machine is at a limit ({cause.strerror}): {LIMITS[cause.errno]}"
        if isinstance(cause, FileNotFoundError) and cause.filename == sys.executable:
            return f"{sys.executable} is gone, and ranks run it: {INSTALL}"
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, the last first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


# Suggestions for mistyped names.

def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`did you mean push?`, or nothing if no allowed name is close."""
    close = get_close_matches(word, list(allowed), n=1)
    return f"did you mean {close[0]}?" if close else ""


# Errors of kernels as text.

LONGEST, LONGEST_TRACEBACK = 600, 4000
MARK = "\nTraceback (most recent call last):\n"
PACKAGE = Path(__file__).parents[1]
FOREIGN = re.compile(r"/(site-packages|dist-packages|lib/python3[^/]*)/|^<")
"""Files of which an author of kernels is not the author."""


def described(error: BaseException) -> str:
    """`NameError: name 'x' is not defined (push.py:32)`, and the traceback from its first foreign frame on."""
    kernels = [place for place in _places(error) if PACKAGE / "kernels" in Path(place[0]).parents]
    file, line = _in_kernel(error) or (_authors(error) or kernels or [("", 0)])[-1]
    where = f" ({Path(file).name}:{line})" if file else ""
    text = "".join(traceback.format_exception(error)).partition(MARK.lstrip("\n"))[2]
    return f"{type(error).__name__}: {str(error)[-LONGEST:]}{where}{MARK}{text.rstrip()[-LONGEST_TRACEBACK:]}"


def in_a_module(error: BaseException) -> str:
    """The error on one line, with the place, if it comes out of code of the user's; else nothing."""
    return summary(described(error)) if _authors(error) else ""


def summary(text: str) -> str:
    """The text of an error on one line, without its traceback."""
    return " ".join(text.partition(MARK)[0].split())


def joined(errors: Iterable[str]) -> str:
    """Several errors as one: all messages, and the traceback of the first error that has one."""
    parts = [text.partition(MARK) for text in dict.fromkeys(errors)]
    report = next((mark + rest for _, mark, rest in parts if mark), "")
    return "; ".join(dict.fromkeys(message for message, _, _ in parts)) + report


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
    for link in chain:
        for frame in traceback.extract_tb(link.__traceback__):
            yield frame.filename, frame.lineno or 0


def _authors(error: BaseException) -> list[tuple[str, int]]:
    """The places in files that belong neither to this package nor to an installed one."""
    return [(file, line) for file, line in _places(error) if not FOREIGN.search(file) and PACKAGE not in Path(file).parents]


def _in_kernel(error: BaseException) -> tuple[str, int] | None:
    """File and line of an error of Triton's compiler. Triton counts lines from the `def` on and names no file."""
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
