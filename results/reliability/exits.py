"""Jobs of two CPU ranks that make two modules, call and close them, destroy their group and end as Python ends.

    python results/reliability/exits.py 200
    python results/reliability/exits.py 200 --torchrun

Prints how many jobs ended with a rank that failed. Ranks are forks of this process, which spares them the imports, or with
`--torchrun` new processes that torch.distributed.run starts. Each rank holds the interpreter's lock as long as it can, so that
gloo's threads come late: in this order a job can abort.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "AUTOTAX_DB": "/nowhere/none.db"}

import torch
import torch.distributed as dist
from torch.distributed import run

from autotax import nn
from autotax.heap.triton_interpreter import patch_interpreter
from autotax.operators.problems import GemmReduceScatter

RANKS = 2
LATE_S = 0.2
"""By how much rank 1 destroys the group later, in every second job."""
SWITCH_S = 100.0
modules: list[nn.Tuned] = []


def job(rank: int, number: int, path: Path | None) -> None:
    """The life of one rank, whose modules live until the interpreter ends. Ranks meet in the file `path`, or by torchrun."""
    meeting = {"store": dist.FileStore(str(path), RANKS), "rank": rank, "world_size": RANKS} if path else {}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting)
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


def forked(number: int, folder: Path) -> list[int]:
    """Runs a job in forks of this process. Returns the statuses of its ranks."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            job(rank, number, folder / f"{number}")
            sys.exit()
        pids.append(pid)
    return [os.waitpid(pid, 0)[1] for pid in pids]


def launched(number: int, folder: Path) -> list[int]:
    """Runs a job under torchrun. Returns the status of torchrun, which is that of a fork: this spares its imports."""
    pid = os.fork()
    if not pid:
        with (folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        options = ["--standalone", "--nproc-per-node", str(RANKS), "--log-dir", str(folder)]
        run.main([*options, __file__, f"{number}", "--rank"])
        sys.exit()
    status = os.waitpid(pid, 0)[1]
    if status:
        print((folder / "log").read_text(), file=sys.stderr)
    return [status]


def main(jobs: int, start: Callable[[int, Path], list[int]]) -> int:
    """Runs the jobs one after another, then prints how many failed."""
    patch_interpreter()
    failed, began = 0, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="exits-"))
    for number in range(jobs):
        statuses = start(number, folder)
        failed += any(statuses)
        if any(statuses) or (number + 1) % 20 == 0:
            print(f"job {number + 1}: statuses {statuses}; {failed} failed so far", flush=True)
    shutil.rmtree(folder)
    print(f"{failed} of {jobs} jobs failed, in {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    count, *options = sys.argv[1:]
    if options == ["--rank"]:
        patch_interpreter()
        job(int(os.environ["RANK"]), int(count), None)
    else:
        sys.exit(min(1, main(int(count), launched if options == ["--torchrun"] else forked)))
