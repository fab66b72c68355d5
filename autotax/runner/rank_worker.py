"""A rank process: `python -m autotax.runner.rank_worker FD`, or a fork, serves jobs from the pipe FD until it closes."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from autotax.runner.disk_full import full_disk
from autotax.runner.processes import die_with_parent
from autotax.runner.protocol import Fatal, Hello, Job, RankSetup


def serve(pipe: Connection) -> None:
    # Triton finds in the environment, which the pool has seen to, whether kernels are interpreted.
    from autotax.hardware import detect, environment
    from autotax.heap import World
    from autotax.heap.rendezvous import meet
    from autotax.kernels.keys import fix_cache_keys
    from autotax.operators.registry import fingerprints, load
    from autotax.runner.session import Session

    fix_cache_keys()
    try:
        setup = pipe.recv()
    except EOFError:
        return
    assert isinstance(setup, RankSetup)
    for name in setup.modules:
        load(name)
    hardware = detect(setup.backend)
    world = World.join(meet(setup.meeting), setup.rank, setup.world_size, setup.backend)
    session = Session(world, hardware, setup.heap_bytes, pipe.send)
    pipe.send(Hello(environment(setup.backend), fingerprints()))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        assert isinstance(job, Job)
        started = time.perf_counter()
        report = session.run(job)
        pipe.send(replace(report, seconds=time.perf_counter() - started))


def main() -> None:
    die_with_parent("autotax-rank")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's to handle
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except Exception as error:
        pipe.send(Fatal(full_disk(error) or f"{type(error).__name__}: {error}"))
        with suppress(OSError):  # a full disk does not take it
            traceback.print_exc()
        os._exit(1)  # a broken device or group cannot be torn down in order
    os._exit(0)


if __name__ == "__main__":
    main()
