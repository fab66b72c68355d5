"""Proving stale winners when a module is made: the first rank of the group has it done, the others wait without their GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from autotax.core.conditions import Conditions
from autotax.core.problem import Problem
from autotax.db.lookup import reload
from autotax.db.reproof import GRACE_S, prove, seconds_of, stale
from autotax.hardware import Hardware
from autotax.heap.world import World
from autotax.nn.consensus import all_or_none

SLACK_S = 30.0
"""Seconds beyond the time for proving that the other ranks wait for the first."""


def prove_first(
    world: World,
    problems: Sequence[Problem],
    hardware: Hardware,
    conditions: Conditions,
    db: str | Path | None,
    wanted: bool | float,
) -> str:
    """Has stale winners of these problems proven, in bounded time; why not all of them were, or nothing. The same on all ranks.

    The ranks look up again afterwards. `wanted` is the same on all ranks. Collective. Raises UsageError, on all ranks alike, for
    a `wanted` that is no time.
    """
    seconds = all_or_none(world, lambda: seconds_of(wanted))
    mine = all_or_none(world, lambda: bool(stale(problems, hardware, conditions, db)))
    told = world.gather((mine, f"autotax/proven/{uuid4()}"), tuple[bool, str])
    if not any(needed for needed, _ in told):
        return ""
    # Ranks that waited in a collective of NCCL would keep their GPUs busy, which are to be measured.
    store, done = dist.distributed_c10d._get_default_store(), told[0][1]
    note = ""
    if world.rank == 0:
        try:
            world.synchronize()
            note = _proven(problems, hardware, conditions, db, seconds)
        finally:
            store.set(done, "1")
    else:
        note = _wait(store, done, seconds + GRACE_S + SLACK_S)
    reload()
    return next(filter(None, world.gather(note, str)), "")


def _proven(
    problems: Sequence[Problem], hardware: Hardware, conditions: Conditions, db: str | Path | None, seconds: float
) -> str:
    """See `prove`; whatever fails is told and fails nothing else: the module is bulk-synchronous then."""
    try:
        return prove(problems, hardware, conditions, db, seconds)
    except Exception as error:
        return f"stale winners could not be proven ({type(error).__name__}: {error})"


def _wait(store: dist.Store, key: str, seconds: float) -> str:
    """Waits for a key in short steps, so that a signal is heeded meanwhile."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if store.check([key]):
            return ""
        time.sleep(0.05)
    return f"rank 0 did not end proving within {seconds:g} s"


