"""Failing together: what one rank cannot do, no rank may believe done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autotax.heap.base import HeapError
from autotax.heap.world import World


@contextmanager
def together(world: World, task: str) -> Iterator[None]:
    """Raises HeapError on every rank if the block raised on one of them. Collective: waits for all at its end."""
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    told = world.gather(cause and (str(cause) or type(cause).__name__))
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(told) if reason]
    if failures:
        raise HeapError(f"cannot {task} ({'; '.join(failures)})") from cause


def agreed(world: World, what: str, value: int) -> int:
    """The value, if it is the same on every rank; else HeapError on every rank. Collective."""
    values = world.gather(value)
    if len(set(values)) > 1:
        raise HeapError(f"the ranks disagree on {what} ({', '.join(map(str, values))}); it must be the same on all")
    return value
