"""Errors that the user can mend. Each message is one line that says what happened and what to do."""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches


class UsageError(ValueError):
    """Bad input: what was given, what is allowed, what to do. Commands exit with code 2, and nothing is stored."""


class MachineError(RuntimeError):
    """The machine fails for every config: a full disk, a database that can no longer be written.

    No config causes it, so it is never stored as the outcome of a config. Commands exit with code 1; the same command goes on
    later.
    """


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
INSTALL = "install autotax again, then run the same command"


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
    """One line about the limit of the machine that caused an error: open files, memory, processes, or an installation that has
    gone. None if none did.
    """
    for cause in _causes(error):
        if isinstance(cause, MemoryError) or "failed to map segment" in str(cause):  # the dynamic linker's words
            return out_of_memory()
        if isinstance(cause, ImportError):
            told = next((line for line in reversed(str(cause).splitlines()) if line), "no reason")
            return f"{cause.name or 'a module'} cannot be imported ({told[:300]}): {INSTALL}"
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return out_of_memory()
        if isinstance(cause, OSError) and cause.errno in LIMITS:
            return f"the machine is at a limit ({cause.strerror}): {LIMITS[cause.errno]}"
        if isinstance(cause, FileNotFoundError) and cause.filename == sys.executable:
            return f"{sys.executable} is gone, and ranks run it: {INSTALL}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
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
