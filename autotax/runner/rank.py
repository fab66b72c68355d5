"""A rank process: `python -m autotax.runner.rank FD`, started by the pool, serves jobs from the pipe FD until it closes.

Before that it waits for its setup, which for a spare comes when a group is lost, or never.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from autotax.runner.child import die_with_parent
from autotax.runner.disk import full_disk
from autotax.runner.protocol import Fatal, Hello, Job, RankSetup


def serve(pipe: Connection) -> None:
    # What needs no setup comes before it, so that a spare has done it by then. It must not touch a device: the spare's group
    # does not exist yet. Triton finds in the environment, which the pool has seen to, whether kernels are interpreted.
    import torch.distributed as dist

    from autotax.hardware import detect, environment, kernel_digest
    from autotax.heap import World
    from autotax.heap.meeting import LOOPBACK
    from autotax.kernels.keys import fix_cache_keys
    from autotax.operators.registry import fingerprints, load, operators
    from autotax.runner.session import Session

    # All kernels are imported now, and their digest is told as it is now: a spare may wait while the sources are edited.
    fix_cache_keys()
    kernel_digest()
    for operator in operators().values():
        for variant in operator.variants.values():
            with suppress(ImportError):  # a Triton for ROCm may lack what variants for NVIDIA import
                variant.kernel_class()
    try:
        setup = pipe.recv()
    except EOFError:
        return
    assert isinstance(setup, RankSetup)
    for name in setup.modules:
        load(name)
    hardware = detect(setup.backend)
    store = dist.TCPStore(LOOPBACK, setup.store_port)
    world = World.join(store, setup.rank, setup.world_size, setup.backend)
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
    die_with_parent()
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
