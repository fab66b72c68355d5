"""Proves winners of another Triton at the construction of a layer of GEMM + All-Reduce, as a server does.

    cp -r autotax COPY/ && rm COPY/autotax/shipped/h*.json
    cd COPY && PYTHONPATH=. torchrun --nproc-per-node 2 .../results/versions/proof.py DATABASE WINNERS.json N K [SIZES [GIB]]

The first SIZES (4) back-to-back winners of a layer with a weight [N, K] are copied from the file to the database, as of Triton
3.0.0. Thresholds of the layer are read twice: only the first time anything is proven. Overlap each rank holds GIB of memory.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from autotax.db import Store, TrialRecord, lookup
from autotax.db.formats import read
from autotax.engines import thresholds
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.software import environment


def keep(db: str, file: str, n: int, k: int, sizes: int) -> None:
    """Copies winners of a layer, as of an older Triton."""
    here = detect()
    old = replace(environment(here.backend), triton="3.0.0")
    layer = {"n": n, "k": k, "output": "replicated", "world_size": 2}
    winners = [entry.winner for entry in read(Path(file)) if layer.items() <= entry.winner.problem.to_dict().items()]
    with Store.open(db) as store:
        for winner in [winner for winner in winners if winner.conditions.mode == "graph"][:sizes]:
            figures = {"latency_us": winner.latency_us, "samples": [[winner.latency_us]] * 2, "verified": True}
            trial = TrialRecord(0, winner.config, "ok", conditions=winner.conditions.to_dict(), **figures)  # type: ignore[arg-type]
            trial_id = store.add_trial(store.begin_run(winner.problem, here, old, {}), trial)
            store.set_winner(replace(winner, hardware=here, environment=old, trial_id=trial_id, samples=None))


def main(db: str, file: str, n: int, k: int, sizes: int = 4, gib: int = 0) -> None:
    os.environ["AUTOTAX_DB"] = db
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    world = World.of(None, device)
    held = torch.empty(gib << 30, dtype=torch.uint8, device=device)
    if world.rank == 0:
        keep(db, file, n, k, sizes)
        free, _ = torch.cuda.mem_get_info()
        print(f"{torch.cuda.get_device_name()}, {free >> 30} GiB free", flush=True)
    dist.barrier()
    for reading in ("first", "second"):
        lookup.reload()
        began = time.monotonic()
        ranges = thresholds.token_ranges(n, k, "bf16", 2, world=world, most=4096)
        if world.rank == 0:
            print(f"{reading} reading: {thresholds.listed(ranges)} tokens, {time.monotonic() - began:.2f} s", flush=True)
    del held
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))  # type: ignore[arg-type]
