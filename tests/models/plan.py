"""A plan lists the tasks of every rank in one call. Its checks are the same for every operator.

`faults` is a proof by enumeration: every element of the output and of an exchange exactly once, every read behind waits
that cover it, every wait ended by signals that can come before it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autotax.kernels import tiling

Span = tuple[int, int]
"""start ... end - 1; empty where end <= start."""
Flag = tuple[str, int]
"""An array of flags in the heap, and the index in it."""


Walk = dict[int, list[int]]
"""Rows of tiles in the order of their first tile, each with its blocks of columns."""


@dataclass(frozen=True)
class Wait:
    """Waits for `signals` signals of this call from `source`, or of the previous call if `ago` is 1."""

    source: int
    flag: Flag
    signals: int
    ago: int = 0


@dataclass(frozen=True)
class Send:
    """A span of the sender's shard becomes visible to a peer, then the peer gets one signal.

    A rank may also signal itself about a copy that the task makes of a span of another rank's shard. Readers of the copy must
    wait for this flag, as if the other rank had sent the span.
    """

    peer: int
    flag: Flag
    span: Span = (0, 0)


@dataclass(frozen=True)
class Task:
    """Waits, reads spans of the shards of others, writes rows of the output (in blocks of columns), then sends."""

    waits: tuple[Wait, ...] = ()
    reads: tuple[tuple[int, Span], ...] = ()
    rows: Span = (0, 0)
    columns: Iterable[int] = ()
    sends: tuple[Send, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The tasks of each rank in the order in which a CPU rank does them: launch after launch, program after program.

    A GPU runs programs side by side and hands out tiles by a counter. Its order is looser; this one is the hardest to
    satisfy, because a program that waits keeps all later ones of its rank from starting.
    """

    tasks: list[list[Task]]
    rows: int
    """Rows of the output, all of which every rank computes."""
    columns: int = 1
    """Blocks of columns of the output."""
    shard: int = 0
    """Elements (or rows) that every rank sends to every peer; 0 where the collective library does it."""
    to_itself: bool = False
    """Whether a rank sends to itself too."""


def walk(rows: int, cols: int, group: int, first: int = 0, programs: int = 1, chiplets: int = 1) -> Walk:
    """A grid of tiles in bands of `group` rows. Tiles are pieces of work from number `first` on, for `programs` and `dies`."""
    walk: Walk = {}
    for piece in range(first, first + rows * cols):
        tile = tiling.remapped(piece, first, first + rows * cols, programs, chiplets) - first
        row, col = divmod(tiling.grouped(tile, rows, cols, group), cols)
        walk.setdefault(row, []).append(col)
    return walk


def faults(plan: Plan) -> str | None:
    """Describes the fault of a plan in one line, or returns None."""
    return _output_fault(plan) or _exchange_fault(plan) or _order_fault(plan)


def _output_fault(plan: Plan) -> str | None:
    for rank, tasks in enumerate(plan.tasks):
        if fault := uneven([task.rows for task in tasks], plan.rows):
            return f"output rows of rank {rank}: {fault}"
        for (first, last), columns in ((task.rows, task.columns) for task in tasks):
            if first < last and sorted(columns) != list(range(plan.columns)):
                return f"output rows {first} to {last} of rank {rank}: not each of {plan.columns} tiles exactly once"
    return None


def _exchange_fault(plan: Plan) -> str | None:
    """Checks that shards reach every peer once, that flags get as many signals as their waits need, and that none is unused."""
    sent: dict[tuple[int, int], list[Span]] = defaultdict(list)
    signals: Counter[tuple[int, Flag]] = Counter()
    waits: dict[tuple[int, Wait], None] = {}  # a set that keeps its order
    for rank, tasks in enumerate(plan.tasks):
        for task in tasks:
            for wait in task.waits:
                waits[rank, wait] = None
            for send in task.sends:
                sent[rank, send.peer].append(send.span)
                signals[send.peer, send.flag] += 1
    ranks = range(len(plan.tasks) if plan.shard else 0)
    for source, peer in ((a, b) for a in ranks for b in ranks if plan.to_itself or a != b):
        if fault := uneven(sent[source, peer], plan.shard):
            return f"shard of rank {source} on its way to rank {peer}: {fault}"
    for rank, wait in waits:
        flag = wait.flag
        if wait.signals != (received := signals[rank, flag]):
            need = f"{wait.signals} signals a call for {flag[0]} {flag[1]} of rank {wait.source}"
            return f"rank {rank} needs {need} and gets {received}"
    for rank, flag in signals.keys() - {(rank, wait.flag) for rank, wait in waits}:
        return f"rank {rank} never waits for {flag[0]} {flag[1]}, so its sender may overtake it"
    return None


def _order_fault(plan: Plan) -> str | None:
    """Runs the tasks of all ranks, each rank in its order, until all are done or none can go on."""
    landed: dict[tuple[int, Flag], list[Span]] = defaultdict(list)
    at = [0] * len(plan.tasks)

    def blocking(rank: int) -> Wait | None:
        waits = plan.tasks[rank][at[rank]].waits
        return next((wait for wait in waits if not wait.ago and len(landed[rank, wait.flag]) < wait.signals), None)

    moved = True
    while moved:
        moved = False
        for rank, tasks in enumerate(plan.tasks):
            while at[rank] < len(tasks) and not blocking(rank):
                task, moved = tasks[at[rank]], True
                here: dict[int, list[Span]] = defaultdict(list)
                for wait in task.waits:
                    here[wait.source] += landed[rank, wait.flag]
                for source, (start, end) in task.reads:
                    if fault := uneven([(max(a, start), min(b, end)) for a, b in here[source]], end, start):
                        return f"rank {rank} reads the shard of rank {source} behind too few waits: {fault}"
                for send in task.sends:
                    landed[send.peer, send.flag].append(send.span)
                at[rank] += 1
    for rank, tasks in enumerate(plan.tasks):
        if at[rank] < len(tasks) and (stuck := blocking(rank)):
            name = f"{stuck.flag[0]} {stuck.flag[1]}"
            return f"rank {rank} waits for {name} of rank {stuck.source}, which cannot be signalled before"
    return None


def uneven(spans: Iterable[Span], end: int, start: int = 0) -> str | None:
    """Describes the first place that spans cover never or twice between `start` and `end - 1`, or returns None."""
    for first, last in sorted(span for span in spans if span[0] < span[1]):
        if first != start:
            return f"{start} to {first} never" if first > start else f"{first} to {min(start, last)} more than once"
        start = last
    if start == end:
        return None
    return f"{start} to {end} never" if start < end else f"{end} to {start} does not exist"
