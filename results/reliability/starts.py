"""STARTS of jobs whose ranks find different databases: all ranks must run one config, end, and have equal bits.

    python results/reliability/starts.py 1000 [--seed 0]

Every second job has two CPU ranks, the others four. Each rank's database is empty, warm, missing, of another version, or written
to while the ranks look up; the states are drawn for all ranks alike or for one rank alone. Each rank makes a row-parallel layer,
calls it with three sizes, and tells its configs and a digest of its results. Ranks are forks of this process, which spares them
the imports. Prints one line a fault, and a table of the configs that ran.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
import torch.distributed as dist

from autotax.core.conditions import ON_CPU
from autotax.core.config import Config
from autotax.db import Store, shipped
from autotax.hardware import detect
from autotax.heap.triton_interpreter import patch_interpreter
from autotax.nn import LinearAllReduce, prepare  # noqa: F401 - ranks need it
from autotax.operators.gemm_reduce_scatter import operator
from autotax.operators.problems import GemmReduceScatter
from autotax.operators.registry import variant_digest
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner

RANKS = (2, 4)
STATES = ("empty", "warm", "other winner", "missing", "other version", "written")
WEIGHTS = (1, 3, 2, 1, 1, 3)
N, K, ROWS = 16, 24, (8, 5, 1)
LATEST_S = 120.0
"""Seconds after which a job counts as hung."""


def winners(path: Path, state: str, world: int) -> None:
    """Writes a database in a state; `written` starts like `empty`."""
    problem = GemmReduceScatter(ROWS[0], N, K, "fp32", "replicated", world)
    with Store.open(f"sqlite:///{path}", create=True) as store:
        if state in ("warm", "other winner", "other version"):
            software = environment("cpu")
            software = replace(software, triton="0.0.1") if state == "other version" else software
            push = space_for(problem, detect("cpu")).default("push")
            config = push if state == "other winner" else Config("all_to_all")
            keep_winner(store, problem, config, detect("cpu"), software, ON_CPU)


def made(folder: Path) -> dict[tuple[str, int], Path]:
    """The databases to copy, by state and number of ranks."""
    paths = {(state, world): folder / f"{state}-{world}.db".replace(" ", "-") for state in STATES for world in RANKS}
    for (state, world), path in paths.items():
        if state != "missing":
            winners(path, state, world)
    return paths


def rank_of(rank: int, world: int, job: Path, state: str, late_s: float) -> None:
    """The main function of a rank: it makes a layer, and reports which config the ranks agreed on."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(str(job / "store"), world), rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))  # fmt: skip
    time.sleep(late_s)
    torch.manual_seed(rank)
    layer = LinearAllReduce(torch.randn(N, K), None, ROWS[0], db=str(job / f"{rank}.db"))
    x, digest = torch.randn(ROWS[0], K), hashlib.sha256()
    for rows in ROWS:
        digest.update(layer(x[:rows]).numpy().tobytes())
    configs = [str(choice.config) for choice in layer.choices]
    (job / f"{rank}.json").write_text(json.dumps([state, configs, digest.hexdigest()]))
    layer.close()
    dist.destroy_process_group()


def forked(work: object, *arguments: object) -> int:
    """The process that does some work and ends."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        work(*arguments)  # type: ignore[operator]
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def ended(pids: list[int]) -> str:
    """Waits for the processes; a text if one failed or hung."""
    left, ends, failed = list(pids), time.monotonic() + LATEST_S, 0
    while left and time.monotonic() < ends:
        for pid in list(left):
            child, status = os.waitpid(pid, os.WNOHANG)
            if child:
                left.remove(pid)
                failed += status != 0
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return f"{len(left)} processes hang" if left else f"{failed} processes failed" if failed else ""


def start(number: int, draw: random.Random, stores: dict[tuple[str, int], Path], folder: Path) -> tuple[str, str]:
    """Runs one job. Returns what ran, and the fault if there is one."""
    world, job = RANKS[number % len(RANKS)], folder / str(number)
    job.mkdir()
    usual, other = (draw.choices(STATES, WEIGHTS)[0] for _ in range(2))
    alone = draw.choice([None] * (2 * world) + [*range(world)])
    states = [other if rank == alone else usual for rank in range(world)]
    for rank, state in enumerate(states):
        if state != "missing":
            shutil.copyfile(stores[state, world], job / f"{rank}.db")
    pids = [forked(rank_of, rank, world, job, state, draw.uniform(0, 0.05)) for rank, state in enumerate(states)]
    pids += [forked(winners, job / f"{rank}.db", "warm", world) for rank, state in enumerate(states) if state == "written"]
    fault = ended(pids)
    reports = [json.loads(path.read_text()) for path in sorted(job.glob("*.json"))]
    configs = {json.dumps(configs) for _, configs, _ in reports}
    if not fault and len(reports) != world:
        fault = f"{len(reports)} of {world} ranks reported"
    if not fault and len(configs) > 1:
        fault = f"the ranks have different configs: {sorted(configs)}"
    if not fault and len({digest for *_, digest in reports}) > 1:
        fault = "the ranks have different bits"
    shutil.rmtree(job, ignore_errors=True)
    ran = "none" if fault else json.loads(configs.pop())[-1].partition("(")[0]
    return ran, fault and f"job {number}, {world} ranks, {states}: {fault}"


def run(jobs: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Runs the jobs one after another; what ran, and the faults."""
    patch_interpreter()
    variants = operator.variants
    for name in variants:  # what every rank would import and read alike
        variant_digest(operator.name, name)
        variants[name].kernel_class()
    shipped.sources("/nowhere/none.db")
    folder = Path(tempfile.mkdtemp(prefix="starts-"))
    pid = forked(made, folder)  # this process opens no database, so that its forks inherit none
    assert not ended([pid])
    stores = {(state, world): folder / f"{state}-{world}.db".replace(" ", "-") for state in STATES for world in RANKS}
    draw, ran, faults, began = random.Random(seed), Counter[str](), [], time.monotonic()
    for number in range(jobs):
        name, fault = start(number, draw, stores, folder)
        ran[name] += 1
        if fault:
            faults.append(fault)
            print(fault, flush=True)
        if (number + 1) % 100 == 0:
            print(f"{number + 1} jobs in {time.monotonic() - began:.0f} s, {len(faults)} faults, {dict(ran)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return ran, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    ran, faults = run(given.jobs, given.seed)
    print(f"{len(faults)} of {given.jobs} jobs had a fault; the greatest size ran {dict(ran)}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
