"""Runs functions on rank processes, with a deadline, and brings back their results or their tracebacks.

    with Ranks(2) as ranks:                       # two processes, kept for many calls
        outputs = ranks.run(function, argument)   # function(world, argument) on each; results in rank order

    outputs = run_ranks(function, 2)              # the same for a single call

Functions travel by name: they and their arguments must pickle.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from autotax.heap.triton_interpreter import patch_interpreter
from autotax.heap.world import Meeting, World, meet
from autotax.operators import load
from autotax.runner.processes import INTERPRETED, rank_environment

GRACE = 3.0
"""Seconds for the other ranks to report once one has failed."""


class RankFailure(AssertionError):
    """A rank raised, died or did not return in time. The message holds the report of each rank."""


class Ranks:
    """`world_size` processes that have joined one World and loaded `modules`. After a failure the next call starts fresh ones."""

    def __init__(self, world_size: int, backend: str = "cpu", modules: tuple[str, ...] = ()) -> None:
        self.world_size = world_size
        self.backend = backend
        self.modules = modules
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._stacks = tempfile.TemporaryDirectory(prefix="ranks-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """`function(world, *args)` on every rank; their results in rank order. Raises RankFailure."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                with suppress(BrokenPipeError):  # that rank is dead, which `_collect` reports
                    pipe.send((self.modules, pickle.dumps((function, args))))
            results, failures = self._collect(time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise
        if failures:
            self.close()
            raise RankFailure("\n".join(f"rank {rank}: {report}" for rank, report in sorted(failures.items())))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends the ranks at once; safe to call twice."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        self._meeting = Meeting()
        # Libraries read their variables on import, so these must be set before the process exists.
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"} | rank_environment(self.backend)):
            context = _how_to_start()
            for rank in range(self.world_size):
                here, remote = context.Pipe()
                place = self._meeting.address, rank, self.world_size, self.backend
                arguments = (remote, self._stack(rank), *place, dict(os.environ))
                process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                remote.close()
                self._processes.append(process)
                self._pipes.append(here)

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        """The results by rank, and the failures by rank."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    succeeded, value = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        for rank in waiting.values():
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.3 if waiting else 0)  # for the stacks to be written
        for rank in waiting.values():
            failures[rank] = f"did not return in time\n{self._stack(rank).read_text()}"
        return results, failures

    def _stack(self, rank: int) -> Path:
        """The file to which a rank writes its stack on SIGUSR1."""
        return Path(self._stacks.name, f"{rank}.txt")


def run_ranks(function: Callable[..., Any], world_size: int, backend: str = "cpu", *args: Any, timeout: float = 60) -> list[Any]:
    """`function(world, *args)` on `world_size` new processes; their results in rank order. Raises RankFailure."""
    with Ranks(world_size, backend) as ranks:
        return ranks.run(function, *args, timeout=timeout)


def _how_to_start() -> SpawnContext | ForkServerContext:
    """Ranks of interpreted kernels are forks of one process that has done their imports, which take seconds.

    Other ranks are new processes: a GPU's libraries do not survive a fork, and imports may read other environment variables.
    """
    if {name: os.environ.get(name) for name in INTERPRETED} != INTERPRETED:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autotax.kernels.offline", "autotax.nn", "autotax.operators.verification", __name__])
    return context


def _serve(
    pipe: Connection, stack: Path, meeting: str, rank: int, world_size: int, backend: str, environment: dict[str, str]
) -> None:
    """The main function of a rank: joins the world, then runs the received functions until the other end of the pipe closes."""
    os.environ.clear()  # the variables of the parent of the fork, which may be outdated
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1, file=stack.open("w"))
    world: World | None = None
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            modules, call = pickle.loads(call)
            for name in modules:
                load(name)
            function, args = pickle.loads(call)
            if world is None:
                if backend == "cpu":
                    patch_interpreter()
                world = World.join(meet(meeting), rank, world_size, backend)
            pipe.send((True, function(world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
