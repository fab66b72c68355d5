"""The entry point of the command `autotax`. An interrupt during its imports ends in one line too."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress

from autotax.core.children import end_with_parent
from autotax.core.errors import RANKS_KIB, limit_met, memory_kib, out_of_memory
from autotax.core.terminal import settle_sizes

PROVER = "AUTOTAX_PROVER"
"""Environment variable with the process id of a program that proves winners before its look-ups."""
LOADING_S = 20
"""Most seconds in which numpy is loaded under a limit of memory; it takes a fraction of one."""


def settle_warnings() -> None:
    """Undoes PYTHONWARNINGS=error, under which a warning of any library would end the command."""
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.resetwarnings()
        warnings.simplefilter("ignore")


def main() -> int:
    """Runs one command and returns its exit code: see autotax.cli.app.main."""
    _end_with_prover()
    limit = memory_kib()
    return _run() if limit is None or limit >= RANKS_KIB else _watched(_run)


def _end_with_prover() -> None:
    """Ends this process when the program dies that proves winners by it, even by SIGKILL. Otherwise it would go on alone."""
    if os.environ.get(PROVER) == str(os.getppid()):
        end_with_parent(signal.SIGTERM)


def _watched(run: Callable[[], int]) -> int:
    """Runs a command in a child process. Libraries end a process that gets no memory, without a word of Python's."""
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError:
        return run()
    if not child:
        os.close(reading)
        try:
            _load_numpy()
            return run()
        finally:
            os.write(writing, b".")
    os.close(writing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts the child too
    for passed in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(passed, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    if not os.read(reading, 1) and os.waitstatus_to_exitcode(status) not in (-signal.SIGTERM, -signal.SIGHUP):
        print(f"autotax: {out_of_memory()}", file=sys.stderr)
        return 1
    return max(os.waitstatus_to_exitcode(status), 0)


def _load_numpy() -> None:
    """Loads numpy, or ends this process: where the memory does not suffice its BLAS may try for ever to get some."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LOADING_S)
    with suppress(ImportError, OSError, MemoryError, SystemError):  # a command that needs numpy meets the error again
        import numpy  # noqa: F401
    signal.alarm(0)


def _run() -> int:
    os.umask(os.umask(0o077) | 0o002)  # code is cached in files, which no stranger may write
    settle_sizes()
    settle_warnings()
    logging.getLogger("sqlalchemy").addHandler(logging.NullHandler())  # its errors arrive as exceptions, too
    try:
        try:
            from autotax.cli.app import main
        except (ImportError, OSError, MemoryError, SystemError) as error:
            print(f"autotax: {limit_met(error) or error}", file=sys.stderr)
            return 1
        return main()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("autotax: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt must not print a traceback


if __name__ == "__main__":
    sys.exit(main())
