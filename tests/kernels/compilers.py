"""Processes that compile for GPUs that are not here: forks of a server that has imported torch, Triton and all kernels.

Their output stays in a Triton cache below `.pytest_cache`, keyed by sources, options and compiler. So a later run compiles only
edited kernels. A fresh clone has an empty cache, and `make clean` deletes it.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotax.runner.processes import Child, ForkServer

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "triton"


class Compilers:
    """Each thread of a pool hands its jobs to a process of its own. Functions travel by name, their arguments are pickled."""

    def __init__(self, workers: int) -> None:
        self.server = ForkServer()
        self.threads = ThreadPoolExecutor(workers)
        self.own = threading.local()
        self.children: list[Child] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """The future of `function(*arguments)` in a compiler process."""
        return self.threads.submit(self.run_there, function, *arguments)

    def close(self) -> None:
        """Ends the processes, also in the middle of a job."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for child in self.children:
            child.stop()
        self.threads.shutdown()
        for child in self.children:
            child.kill()
        self.server.close()

    def run_there(self, function: Callable[..., Any], *arguments: Any) -> Any:
        child = getattr(self.own, "child", None)
        if child is None:
            child = self.own.child = self.server.child(__name__, [], {"TRITON_CACHE_DIR": str(CACHE)})
            self.children.append(child)
        try:
            child.send((function, arguments))
            child.pipe.poll(None)  # a read waits for a few seconds only
            succeeded, value = child.pipe.recv()
        except (EOFError, OSError):  # the compiler may end its process on a fatal error
            del self.own.child
            raise RuntimeError(f"the compiler {child.last_words()}") from None
        if not succeeded:
            raise RuntimeError(value)
        return value


@contextmanager
def compilers(workers: int = 2) -> Iterator[Compilers]:
    """A pool of them. The compiler may end its process on a fatal error, so it never runs in ours."""
    pool = Compilers(workers)
    try:
        yield pool
    finally:
        pool.close()


def main() -> None:
    """A compiler process: runs what comes through its pipe, until that closes."""
    pipe = Connection(int(sys.argv[1]))
    CACHE.mkdir(parents=True, exist_ok=True)
    with suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(*arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main()
