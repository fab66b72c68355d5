"""One process a rank for the scripts beside this one: started, given one function, waited for no longer than a deadline."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

GRACE_S = 5.0
"""Seconds that the other ranks have to tell their side once one has failed."""


class RankFailure(Exception):
    """A rank raised, died or did not come back in time; the message holds what each could tell."""


def on_ranks(function: Callable[..., Any], world_size: int, backend: str, *arguments: Any, timeout_s: float) -> list[Any]:
    """`function(world, *arguments)` on every rank; the results in rank order. Raises RankFailure; no process is left behind."""
    from autotax.heap.rendezvous import Meeting

    meeting = Meeting()
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    ours = {"TRITON_INTERPRET": "1" if backend == "cpu" else "0", "OMP_NUM_THREADS": "1", "AUTOTAX_PARENT": str(os.getpid())}
    ours |= {"GLOO_SOCKET_IFNAME": "lo"}
    try:
        with mock.patch.dict(os.environ, ours):  # libraries read these on import
            for rank in range(world_size):
                here, there = spawn.Pipe()
                told = (there, function, meeting.address, rank, world_size, backend, arguments)
                process = spawn.Process(target=_rank, args=told, daemon=True)
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
        return _collect(pipes, time.monotonic() + timeout_s, timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                succeeded, value = False, "died"
            (results if succeeded else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    failures |= dict.fromkeys(waiting.values(), f"did not come back (limit {timeout_s:.0f} s)")
    if failures:
        raise RankFailure("\n".join(f"rank {rank}: {told}" for rank, told in sorted(failures.items())))
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection, function: Callable[..., Any], meeting: str, rank: int, world_size: int, backend: str,
    arguments: Sequence[Any],
) -> None:
    from autotax.runner.processes import die_with_parent

    die_with_parent("rank")
    try:
        from autotax.heap import World
        from autotax.heap.rendezvous import meet

        world = World.join(meet(meeting), rank, world_size, backend)
        pipe.send((True, function(world, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.recv_bytes()  # until the parent ends it: a rank that leaves early ends collectives of the others
