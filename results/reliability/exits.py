"""EXITS of jobs: two CPU ranks make two modules, call and close them, destroy their group and end as Python ends.

    python results/reliability/exits.py 200

Prints one line: how many jobs ended with a rank that failed. Ranks are forks of this process, which spares them the imports. Each
holds the interpreter's lock as long as it can, so that gloo's threads come late: the order in which a job can abort.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "AUTOTAX_DB": "/nowhere/none.db"}

import torch
import torch.distributed as dist

from autotax import nn
from autotax.heap.triton_interpreter import patch_interpreter
from autotax.operators.problems import GemmReduceScatter

RANKS = 2
LATE_S = 0.2
"""By how much rank 1 destroys the group later, in every second job."""
SWITCH_S = 100.0
modules: list[nn.Tuned] = []


def job(rank: int, number: int, path: Path) -> None:
    """What one rank does. The modules live until the interpreter ends."""
    store = dist.FileStore(str(path), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    problem = GemmReduceScatter(16, 24, 40, "fp32", "replicated", RANKS)
    modules.extend(nn.Tuned(problem, device="cpu") for _ in range(2))
    x, weight = torch.randn(16, 40), torch.randn(24, 40)
    for module in modules:
        module(x, weight)
    sys.setswitchinterval(SWITCH_S)
    for module in modules:
        module.close()
    if rank and number % 2:
        time.sleep(LATE_S)
    dist.destroy_process_group()


def main(jobs: int) -> None:
    """Runs the jobs one after another, then says how many failed."""
    patch_interpreter()
    failed, began = 0, time.monotonic()
    folder = tempfile.mkdtemp(prefix="exits-")
    for number in range(jobs):
        pids = []
        for rank in range(RANKS):
            pid = os.fork()
            if not pid:
                job(rank, number, Path(folder, f"{number}"))
                return
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        failed += any(statuses)
        if any(statuses) or (number + 1) % 20 == 0:
            print(f"job {number + 1}: statuses {statuses}; {failed} failed so far", flush=True)
    shutil.rmtree(folder)
    print(f"{failed} of {jobs} jobs failed, in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
