"""What the kernels of a config do, as plain arithmetic: who computes, sends and waits for what, in which order.

`schedule` enumerates a config with the functions of `spaces.order` that its kernels compile; `check` says what would go
wrong. Together they are the model that the kernels implement: a config that `check` finds fault with must not be run.

A call on one rank is a list of tasks, in the order in which a CPU rank does them: launch after launch, and within a launch
program after program. On a GPU programs run side by side and take tiles from a counter, which only loosens that order; it
is the hardest one to satisfy, because a program that waits keeps all later ones of its rank from starting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autotax.config import Config
from autotax.problem import AllGatherGemm, FlashDecode, Problem, ceil_div
from autotax.spaces import order
from autotax.spaces.flash_decode import tokens_per_split

Span = tuple[int, int]
"""start ... end - 1; empty where end <= start."""
Flag = tuple[str, int]
"""An array of flags in the heap, and the index in it."""

PUBLISHERS = 64
"""Programs of `pull` that copy the own shard into the heap and signal; one on CPU ranks."""
PIECE_ALIGNMENT = 1024
"""Elements by which pieces of a shard are aligned."""


class Wait(NamedTuple):
    """Until `signals` signals of this call have come from `source`; of the call before, if `ago` is 1."""

    source: int
    flag: Flag
    signals: int
    ago: int = 0


class Send(NamedTuple):
    """A span of the own shard made visible to a peer, then one signal to it."""

    peer: int
    flag: Flag
    span: Span = (0, 0)


class Task(NamedTuple):
    """Waits, then reads spans of the shards of others, then writes output (`rows`, in these blocks of columns), then sends."""

    waits: tuple[Wait, ...] = ()
    reads: tuple[tuple[int, Span], ...] = ()
    rows: Span = (0, 0)
    columns: Iterable[int] = ()
    sends: tuple[Send, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """One call on all ranks, and what it must amount to."""

    tasks: list[list[Task]]
    rows: int
    """Rows of the output that every rank computes."""
    columns: int = 1
    """Blocks of columns of the output."""
    shard: int = 0
    """Elements (or rows) that every rank sends to every peer; 0 where the collective library does it."""
    to_itself: bool = False
    """Whether a rank sends to itself too."""


def schedule(problem: Problem, config: Config, publishers: int = PUBLISHERS) -> Schedule:
    """What a call does. Raises KeyError for a variant that is not modelled here."""
    if isinstance(problem, AllGatherGemm):
        return _all_gather_gemm(problem, config, publishers)
    assert isinstance(problem, FlashDecode)
    return _flash_decode(problem, config)


def check(problem: Problem, config: Config, publishers: int = PUBLISHERS) -> str | None:
    """What is wrong with a config, in one line, or None: every output element, token and byte of an exchange exactly once,
    every read behind waits that cover it, every wait ended by signals that come before it in the order of a CPU rank."""
    if isinstance(problem, FlashDecode) and (fault := _attention_fault(problem, config)):
        return fault
    return faults(schedule(problem, config, publishers))


# All-Gather + GEMM


def _all_gather_gemm(problem: AllGatherGemm, config: Config, publishers: int) -> Schedule:
    ranks = range(problem.world_size)
    if config.variant == "bsp":  # the collective library waits, the vendor's GEMM computes
        return Schedule([[Task(rows=(0, problem.m), columns=(0,))] for _ in ranks], problem.m)
    before, arrival, after = _EXCHANGES[config.variant]
    mine, theirs = _walks(problem, config)
    tasks = [
        [
            *before(problem, config, rank, publishers),
            *_gemm(problem, config, rank, mine, theirs, lambda s, r: arrival(problem, config, s, r, publishers)),
            *after(problem, rank),
        ]
        for rank in ranks
    ]
    size = problem.shard_rows * problem.shard_cols
    return Schedule(tasks, problem.m, ceil_div(problem.n, config["block_n"]), size)


Walk = dict[int, list[int]]
"""Rows of tiles in the order of their first tile, each with its blocks of columns."""
Arrival = Callable[[int, Span], tuple[Wait, ...]]
"""The waits behind which rows of a source may be read."""


def _walks(problem: AllGatherGemm, config: Config) -> tuple[Walk, Walk]:
    """The tiles of the own rows, then those of the others' (with shard k all tiles are in the first); on every rank alike."""
    m_tiles, n_tiles = ceil_div(problem.shard_rows, config["block_m"]), ceil_div(problem.n, config["block_n"])
    others = problem.world_size - 1 if problem.shard == "m" else 0
    return _walk(m_tiles, n_tiles, config["group_m"]), _walk(others * m_tiles, n_tiles, config["group_m"])


def _walk(rows: int, cols: int, group: int) -> Walk:
    walk: Walk = {}
    for tile in range(rows * cols):
        row, col = divmod(order.grouped(tile, rows, cols, group), cols)
        walk.setdefault(row, []).append(col)
    return walk


def _gemm(problem: AllGatherGemm, config: Config, rank: int, mine: Walk, theirs: Walk, arrival: Arrival) -> Iterator[Task]:
    """gather_gemm, a task for each row of tiles: its first tile waits for all of them."""
    world, rows, cols, block = problem.world_size, problem.shard_rows, problem.shard_cols, config["block_m"]
    m_tiles = ceil_div(rows, block)

    def tiles(band: int, sources: list[int], base: int, columns: list[int]) -> Task:
        span = (band * block, min(band * block + block, rows))
        waits = tuple(wait for source in sources for wait in arrival(source, span))
        reads = tuple((source, (span[0] * cols, span[1] * cols)) for source in sources)
        return Task(waits, reads, (base + span[0], min(base + span[1], problem.m)), columns)

    ring = [(rank - step) % world for step in range(1, world)]
    for band, columns in mine.items():
        yield tiles(band, ring if problem.shard == "k" else [], 0 if problem.shard == "k" else rank * rows, columns)
    for band, columns in theirs.items():
        step, row = divmod(order.remote_row(band, m_tiles, world, config["order"] == "interleaved"), m_tiles)
        source = (rank - step) % world
        yield tiles(row, [source], source * rows, columns)


def _chunk_waits(problem: AllGatherGemm, config: Config, source: int, rows: Span, signals: int) -> tuple[Wait, ...]:
    size, chunks = config["chunk_rows"], ceil_div(problem.shard_rows, config["chunk_rows"])
    held = range(rows[0] // size, (rows[1] - 1) // size + 1)
    return tuple(Wait(source, ("chunk", source * chunks + chunk), signals) for chunk in held)


def _push(problem: AllGatherGemm, config: Config, rank: int, _: int) -> Iterator[Task]:
    """Comm programs: a program takes every comm-th unit, and waits for nobody."""
    world, cols, rows, pieces = problem.world_size, problem.shard_cols, problem.shard_rows, config["pieces"]
    chunks, size = ceil_div(rows, config["chunk_rows"]), config["chunk_rows"] * cols
    piece_size = ceil_div(size, pieces * PIECE_ALIGNMENT) * PIECE_ALIGNMENT

    def send(unit: int) -> Send:
        what = order.push_unit(unit, chunks, pieces, world, config["order"] == "interleaved")
        chunk, peer = what // pieces % chunks, (rank + what // pieces // chunks) % world
        start = chunk * size + what % pieces * piece_size
        return Send(peer, ("chunk", rank * chunks + chunk), (start, min(start + piece_size, (chunk + 1) * size, rows * cols)))

    for program in range(config["comm"]):
        yield Task(sends=tuple(map(send, range(program, (world - 1) * chunks * pieces, config["comm"]))))


def _copy(problem: AllGatherGemm, config: Config, rank: int, _: int) -> Iterator[Task]:
    """open_call waits until all inboxes are free; then the copy engines send chunk by chunk, peers shared out among streams."""
    world, cols, rows, size = problem.world_size, problem.shard_cols, problem.shard_rows, config["chunk_rows"]
    peers, chunks = [(rank + hop) % world for hop in range(1, world)], ceil_div(rows, size)
    yield Task(waits=tuple(Wait(peer, ("finished", peer), 1, ago=1) for peer in peers))
    for lane in range(min(config["streams"], len(peers))):
        for peer in peers[lane :: min(config["streams"], len(peers))]:
            spans = [(chunk * size * cols, min((chunk + 1) * size, rows) * cols) for chunk in range(chunks)]
            yield Task(sends=tuple(Send(peer, ("chunk", rank * chunks + i), span) for i, span in enumerate(spans)))


def _publish(problem: AllGatherGemm, _: Config, rank: int, publishers: int) -> Iterator[Task]:
    """Every program copies its part of the shard into the heap and signals all peers."""
    world, size = problem.world_size, problem.shard_rows * problem.shard_cols
    part = ceil_div(size, publishers * PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    for start in range(0, publishers * part, part):
        span = (start, min(start + part, size))
        yield Task(sends=tuple(Send((rank + hop) % world, ("shard", rank), span) for hop in range(1, world)))


def _finish(problem: AllGatherGemm, rank: int) -> Iterator[Task]:
    """The last program to leave tells all peers that this rank's inbox is free."""
    world = problem.world_size
    yield Task(sends=tuple(Send((rank + hop) % world, ("finished", rank)) for hop in range(1, world)))


# Before the tiles; what a tile waits for; after the tiles.
_EXCHANGES: dict[str, tuple[Callable[..., Iterator[Task]], Callable[..., tuple[Wait, ...]], Callable[..., Iterable[Task]]]] = {
    "push": (_push, lambda p, c, source, rows, _: _chunk_waits(p, c, source, rows, c["pieces"]), lambda *_: ()),
    "copy_engine": (_copy, lambda p, c, source, rows, _: _chunk_waits(p, c, source, rows, 1), _finish),
    "pull": (_publish, lambda p, c, source, rows, parts: (Wait(source, ("shard", source), parts),), lambda *_: ()),
}


# Flash Decode


def _flash_decode(problem: FlashDecode, config: Config) -> Schedule:
    """The output and what is exchanged are rows (query heads), in blocks that one program merges."""
    rows, world = problem.batch * problem.q_heads, problem.world_size
    if config.variant == "bsp":
        block = config["heads"]
        merged = [Task(rows=(first, first + block), columns=(0,)) for first in range(0, rows, block)]
        return Schedule([merged] * world, rows)
    if config.variant == "fused":  # split launch, merge and push launch, receive launch
        block, pushed = config["heads"], list(range(rows // config["heads"]))
        received = pushed
    else:
        block, pushed = {"single": problem.group}[config.variant], _finishing_order(problem, config)
        items, receivers = problem.batch * problem.kv_heads, config["receivers"]
        received = [item for receiver in range(receivers) for item in range(receiver, items, receivers)]
    blocks = rows // block

    def push(rank: int, index: int) -> Task:
        span, flag = (index * block, (index + 1) * block), ("rows", rank * blocks + index)
        return Task(sends=tuple(Send((rank + hop) % world, flag, span) for hop in range(1, world + 1)))

    def receive(rank: int, index: int) -> Task:
        span, sources = (index * block, (index + 1) * block), [(rank - hop) % world for hop in range(world)]
        waits = tuple(Wait(source, ("rows", source * blocks + index), 1) for source in sources)
        return Task(waits, tuple((source, span) for source in sources), span, (0,))

    tasks = [[*(push(rank, i) for i in pushed), *(receive(rank, i) for i in received)] for rank in range(world)]
    return Schedule(tasks, rows, shard=rows, to_itself=True)


def attended(problem: FlashDecode, config: Config) -> list[tuple[int, int]]:
    """The (item, split) of each split program, in program order; an item is a KV head of a sequence."""
    items, splits = problem.batch * problem.kv_heads, config["splits"]
    places = [order.chiplet(program, items * splits, config["chiplets"]) for program in range(items * splits)]
    if config["order"] == "split_first":
        return [(place % items, place // items) for place in places]
    return [(place // splits, place % splits) for place in places]


def tokens(length: int, config: Config) -> list[Span]:
    """The tokens that each split attends to in a sequence of `length` tokens."""
    per = tokens_per_split(length, config["block_s"], config["splits"])
    return [(split * per, min(split * per + per, length)) for split in range(config["splits"])]


def _finishing_order(problem: FlashDecode, config: Config) -> list[int]:
    """Items in the order in which their last split is done: that program merges and pushes."""
    done: Counter[int] = Counter()
    finished = []
    for item, _ in attended(problem, config):
        done[item] += 1
        if done[item] == config["splits"]:
            finished.append(item)
    return finished


def _attention_fault(problem: FlashDecode, config: Config) -> str | None:
    wanted = {(item, split) for item in range(problem.batch * problem.kv_heads) for split in range(config["splits"])}
    programs = attended(problem, config)
    if set(programs) != wanted or len(programs) != len(wanted):
        lost = sorted(wanted - set(programs))
        return f"{len(lost)} of {len(wanted)} pieces of the KV cache are attended by no program, (item, split) {lost[:1]}"
    for length in _telling_lengths(problem.shard_len, config["block_s"], config["splits"]):
        if fault := _uneven(tokens(length, config), length):
            return f"of a sequence of {length} tokens, {fault}"
    return None


def _telling_lengths(longest: int, block: int, splits: int) -> list[int]:
    """All lengths of a short shard; of a long one those around multiples of blocks and of rounds of all splits."""
    if longest <= 64:
        return list(range(longest + 1))
    round_, rounds = block * splits, longest // (block * splits)
    near = [0, block, round_, rounds // 2 * round_, rounds * round_, longest // 3, longest // block * block, longest]
    return sorted({at + by for at in near for by in (-1, 0, 1) if 0 <= at + by <= longest})


# What a schedule must fulfil


def faults(plan: Schedule) -> str | None:
    """What is wrong with a schedule, in one line, or None."""
    for rank, tasks in enumerate(plan.tasks):
        bands = [task for task in tasks if task.rows[0] < task.rows[1]]
        if fault := _uneven([task.rows for task in bands], plan.rows):
            return f"on rank {rank}, output: {fault}"
        for task in bands:
            if sorted(task.columns) != list(range(plan.columns)):
                return f"on rank {rank}, output rows {task.rows[0]} to {task.rows[1]}: tiles are computed twice or never"
    return _exchange_fault(plan) or _order_fault(plan)


def _exchange_fault(plan: Schedule) -> str | None:
    """Every shard reaches every peer once, and signals are as many as the waits count on: no more, no less, none unheeded."""
    world = len(plan.tasks)
    sent: dict[tuple[int, int], list[Span]] = defaultdict(list)
    signals: Counter[tuple[int, Flag]] = Counter()
    waits: dict[tuple[int, Flag], Wait] = {}
    for rank, tasks in enumerate(plan.tasks):
        for task in tasks:
            waits |= {(rank, wait.flag): wait for wait in task.waits}
            for send in task.sends:
                sent[rank, send.peer].append(send.span)
                signals[send.peer, send.flag] += 1
    pairs = [(a, b) for a in range(world) for b in range(world) if plan.to_itself or a != b]
    for source, peer in pairs if plan.shard else ():
        if fault := _uneven(sent[source, peer], plan.shard):
            return f"what rank {source} sends to rank {peer}: {fault}"
    for rank, flag in sorted(signals.keys() | waits.keys()):
        told, wait = signals[rank, flag], waits.get((rank, flag))
        if wait is None:
            return f"rank {rank} never waits for {_name(flag)}, so its sender may run ahead of it"
        if told != wait.signals:
            return f"rank {rank} waits for {wait.signals} signals at {_name(flag)} of rank {wait.source}; {told} come in a call"
    return None


def _order_fault(plan: Schedule) -> str | None:
    """Runs the tasks of all ranks, each rank in its order, until all are done or none can go on."""
    arrived: dict[tuple[int, Flag], list[tuple[int, Span]]] = defaultdict(list)
    at = [0] * len(plan.tasks)

    def blocked(rank: int, task: Task) -> Wait | None:
        return next((wait for wait in task.waits if not wait.ago and len(arrived[rank, wait.flag]) < wait.signals), None)

    moved = True
    while moved:
        moved = False
        for rank, tasks in enumerate(plan.tasks):
            while at[rank] < len(tasks) and not blocked(rank, task := tasks[at[rank]]):
                here = [landed for wait in task.waits for landed in arrived[rank, wait.flag]]
                for source, span in task.reads:
                    if fault := _uneven([s for sender, s in here if sender == source], span[1], span[0]):
                        return f"rank {rank} reads rank {source}'s shard before it has come: {fault}"
                for send in task.sends:
                    arrived[send.peer, send.flag].append((rank, send.span))
                at[rank] += 1
                moved = True
    for rank, tasks in enumerate(plan.tasks):
        if at[rank] < len(tasks) and (wait := blocked(rank, tasks[at[rank]])):
            return f"rank {rank} waits for {_name(wait.flag)} of rank {wait.source}, which is signalled only after it"
    return None


def _name(flag: Flag) -> str:
    return f"flag {flag[0]} {flag[1]}"


def _uneven(spans: Iterable[Span], end: int, start: int = 0) -> str | None:
    """Where start ... end is not covered exactly once by spans (what lies outside does not matter there), or None."""
    whole = start == 0
    for first, last in sorted(span for span in spans if span[0] < span[1]):
        if first > start:
            break
        if whole and first < start:
            return f"{first} to {min(start, last)} more than once"
        start = max(start, last)
    if start < end:
        return f"{start} is missing"
    return f"{end} to {start} is too much" if whole and start > end else None
