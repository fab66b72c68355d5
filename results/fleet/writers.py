"""How many trials a second one PostgreSQL server takes from many tuners, which write one at a time: see autotax/db/connection.py.

    pip install 'autotax[test]'; python results/fleet/writers.py > results/fleet/writers.txt
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autotax.db import Store
from tests.db.conftest import ENVIRONMENT, HARDWARE, PROBLEM, a_trial
from tests.db.server import binaries, running

SECONDS = 8.0
SAMPLES = [[100.0 + i / 7 for i in range(20)] for _ in range(4)]


def write(url: str, barrier: object, kept: object) -> None:
    with Store.open(url) as store:
        run_id = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})
        barrier.wait()  # type: ignore[attr-defined]
        until, count = time.monotonic() + SECONDS, 0
        while time.monotonic() < until:
            store.add_trial(run_id, a_trial(count, samples=SAMPLES))
            count += 1
    with kept.get_lock():  # type: ignore[attr-defined]
        kept.value += count  # type: ignore[attr-defined]


def main() -> None:
    programs, fork = binaries(), multiprocessing.get_context("fork")
    assert programs
    print(f"cores {os.cpu_count()}, load average {os.getloadavg()[0]:.1f} before; trials a second that the database keeps")
    for options, name in (("", "waiting for the disk at each commit"), ("-F", "not waiting")):
        with running(programs, options) as url:
            with Store.open(url):
                pass
            for writers in (1, 4, 16):
                barrier, kept = fork.Barrier(writers), fork.Value("i", 0)
                processes = [fork.Process(target=write, args=[url, barrier, kept]) for _ in range(writers)]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
                print(f"  {writers} writers, {name}: {kept.value / SECONDS:.0f}", flush=True)


if __name__ == "__main__":
    main()
