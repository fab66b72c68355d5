"""Collective errors: if one rank fails, all ranks raise."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from autotax.core.errors import UsageError
from autotax.heap.base import HeapError
from autotax.heap.world import CONTROL_TIMEOUT, RankTimeout, World, reason_of

T = TypeVar("T")
ASKING_S = 0.02
_calls: Counter[str] = Counter()


@contextmanager
def together(world: World, task: str) -> Iterator[None]:
    """Raises HeapError on every rank if the block raised on one of them. Collective: waits for all ranks at the end of the block.
    """
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    reasons = world.gather(reason_of(cause), str | None)
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if failures:
        raise HeapError(f"cannot {task} ({'; '.join(failures)})") from cause


def by_rank(values: Sequence[object]) -> str:
    """`rank 0: this; rank 1: that`."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def all_or_none(world: World | None, make: Callable[[], T]) -> T:
    """Calls `make` on every rank and returns its result, unless it raised on one of them. Collective.

    Raises:
        UsageError: `make` raised on some rank. A rank whose `make` raised another error raises that one.
    """
    if world is None:
        return make()
    value, cause = None, None
    try:
        value = make()
    except Exception as error:
        cause = error
    errors = world.gather(reason_of(cause), str | None)
    if cause and not isinstance(cause, UsageError):
        raise cause
    if any(errors):
        raise UsageError(errors[0] if len(set(errors)) == 1 else by_rank([line or "ready" for line in errors])) from cause
    return value  # type: ignore[return-value]


def agreed(world: World, what: str, value: int) -> int:
    """The value, if it is the same on every rank; else HeapError on every rank. Collective."""
    values = world.gather(value, int)
    if len(set(values)) > 1:
        raise HeapError(f"the ranks disagree on {what} ({', '.join(map(str, values))}); it must be the same on all")
    return value


def apart(world: World, task: str, work: Callable[[], T]) -> T:
    """Like `together`, for work that contains collectives, where the other ranks would wait for ever for a rank that fails alone.

    The work runs in a thread, and each rank reports its outcome through the store. If a rank fails, the threads of the other
    ranks remain blocked in their collective. The processes can report the error and should then end.
    """
    done: list[T] = []
    group = str(world.control.group_name)
    _calls[group] += 1
    # The clone has a separate connection, which the collectives of the thread do not block.
    clone = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"autotax/apart/{group}/{_calls[group]}", clone)

    def run() -> None:
        reason = ""
        try:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)  # the current device is per thread
            done.append(work())
        except BaseException as error:
            reason = " ".join((str(error) or type(error).__name__).split())
        store.set(str(world.rank), reason)

    threading.Thread(target=run, daemon=True, name=task).start()
    waiting, failures, last = set(range(world.size)), list[str](), time.monotonic() + CONTROL_TIMEOUT.total_seconds()
    while waiting and not failures:
        ended = {rank for rank in waiting if store.check([str(rank)])}
        endings = {rank: store.get(str(rank)).decode() for rank in sorted(ended)}
        failures = [f"rank {rank}: {reason}" for rank, reason in endings.items() if reason]
        waiting -= ended
        if waiting and time.monotonic() > last:
            raise RankTimeout(f"rank {world.rank} waited to {task} for rank {', '.join(map(str, sorted(waiting)))}")
        time.sleep(ASKING_S if waiting else 0)
    if failures:
        # All ranks raise the same error, the first that was reported.
        first = store.compare_set("failures", "", "; ".join(failures)).decode()
        raise HeapError(f"cannot {task} ({first})")
    return done[0]
