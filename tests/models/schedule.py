"""A model of the kernels of a config in plain arithmetic: the order in which programs compute, send and wait.

`schedule` enumerates a config with the functions of `spaces.order` that its kernels compile; `check` says what would go
wrong if it ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autotax.core.config import Config
from autotax.core.problem import Problem, ceil_div
from autotax.kernels import tiling
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS, K_ALIGNMENT, last_pieces
from autotax.operators import named
from autotax.operators.problems import AllGatherGemm, FlashDecode, GemmReduceScatter
from tests.models import reduce_plan
from tests.models.plan import Flag, Plan, Send, Span, Task, Wait, Walk, faults, uneven, walk
from tests.models.specialized_plan import packets_plan, specialized_plan, words_plan

PUBLISHERS = 64
"""Programs of `pull` that copy the rank's shard into the heap. Each sends one signal."""
PROCESSORS = 304
"""Number of processors of a GPU of several dies."""
PART_ALIGNMENT = 1024
"""Alignment of the publishers' parts, in elements."""


MODELLED = {
    "all-gather-gemm": (
        "bsp",
        "decomposed",
        "copy_engine",
        "pull",
        "push",
        "push_two_kernel",
        "push_specialized",
        "push_words",
        "push_packets",
    ),
    "flash-decode": ("bsp", "gather", "fine_grained", "fused", "single", "resident", "compact"),
}
MOST_STEPS = 20_000


def _steps(problem: Problem, config: Config) -> int:
    """The approximate number of tiles and waits to enumerate."""
    world = problem.world_size
    if isinstance(problem, AllGatherGemm):
        finest = min(int(config.values.get(name, problem.m)) for name in ("block_m", "chunk_rows"))
        waits = world * world * ceil_div(problem.shard_rows, finest) * int(config.values.get("k_groups", 1))
        if config.variant == "push_specialized":  # a box is a span of its own
            waits += world * world * problem.shard_rows * problem.shard_cols // (GROUP_ROWS * BLOCK_K)
        if config.variant == "push_packets":  # so is a piece
            waits += world * world * problem.shard_rows * problem.shard_cols // int(config["piece"])
        rows, cols = (int(config.values.get(name, problem.n)) for name in ("block_m", "block_n"))
        return waits + ceil_div(problem.m, rows) * ceil_div(problem.n, cols)
    assert isinstance(problem, FlashDecode)
    return world * world * problem.rows // int(config.values.get("heads", problem.group))


def check(problem: Problem, config: Config) -> str | None:
    """Describes the fault of a config in one line, or returns None. Takes milliseconds.

    Returns None without a check for operators and variants without a model here, and for configs of more than MOST_STEPS steps.
    Large configs use the same arithmetic as the small ones, which are enumerated.
    """
    if isinstance(problem, GemmReduceScatter):
        return reduce_plan.check(problem, config)
    if config.variant not in MODELLED.get(problem.op, ()) or _steps(problem, config) > MOST_STEPS:
        return None
    if isinstance(problem, FlashDecode) and (fault := _attention_fault(problem, config)):
        return fault
    return faults(schedule(problem, config))


def schedule(problem: Problem, config: Config) -> Plan:
    """The plan of a call. Raises KeyError for a variant without a model here."""
    if isinstance(problem, AllGatherGemm):
        return _all_gather_gemm(problem, config)
    if isinstance(problem, GemmReduceScatter):
        return reduce_plan.reduce_plan(problem, config)
    assert isinstance(problem, FlashDecode)
    return _flash_decode(problem, config)


# All-Gather + GEMM


def _all_gather_gemm(problem: AllGatherGemm, config: Config) -> Plan:
    ranks = range(problem.world_size)
    if config.variant in ("bsp", *named(problem.op).peers):  # the library waits, the vendor's GEMM computes
        return Plan([[Task(rows=(0, problem.m), columns=(0,))] for _ in ranks], problem.m)
    if config.variant == "decomposed":
        tasks = [[*_gather(problem, config, rank), *_products(problem, config, rank)] for rank in ranks]
        return Plan(tasks, problem.m, shard=problem.shard_rows * problem.shard_cols)
    if config.variant == "push_specialized":
        return specialized_plan(problem, config)
    if config.variant == "push_words":
        return words_plan(problem, config)
    if config.variant == "push_packets":
        return packets_plan(problem, config)
    deliver = DELIVERIES[config.variant]
    m_tiles, n_tiles = ceil_div(problem.shard_rows, config["block_m"]), ceil_div(problem.n, config["block_n"])
    others = len(ranks) - 1 if problem.shard == "m" else 0
    group, workers = config["group_m"], (PROCESSORS - int(config.values.get("comm", 0)), int(config.values.get("dies", 1)))
    own, remote = (  # on every rank alike
        walk(rows * m_tiles, n_tiles, group, first, *workers) for rows, first in ((1, 0), (others, m_tiles * n_tiles))
    )
    if across := config.values.get("across"):
        remote = walk(ceil_div(len(ranks) * problem.shard_rows, config["block_m"]), n_tiles, group, 0, *workers)
    tasks = [[*deliver(problem, config, rank), *_gemm(problem, config, rank, own, remote)] for rank in ranks]
    if config.variant == "copy_engine":  # the last program to leave says that the inbox is free
        for rank in ranks:
            tasks[rank].append(Task(sends=tuple(Send(peer, ("finished", rank)) for peer in ranks if peer != rank)))
    return Plan(tasks, problem.m, n_tiles, problem.shard_rows * problem.shard_cols, to_itself=bool(across))


def _k_groups(problem: AllGatherGemm, config: Config) -> list[Span]:
    """The columns of each K group of a shard: whole K blocks, the last groups shorter or empty."""
    groups, cols = int(config.values.get("k_groups", 1)), problem.shard_cols
    span = ceil_div(cols, groups * K_ALIGNMENT) * K_ALIGNMENT
    return [(min(start, cols), min(start + span, cols)) for start in range(0, groups * span, span)]


def _block(problem: AllGatherGemm, rows: Span, cols: Span) -> Span:
    """Some rows of a K group of a shard as a span: all rows of the first K group, then all of the next, and so on."""
    base, width = cols[0] * problem.shard_rows, cols[1] - cols[0]
    return base + rows[0] * width, base + rows[1] * width


class Piece(NamedTuple):
    """Some rows of one K group of a chunk. A push sends it to rank + `hop`; a pull fetches it from rank - `hop`."""

    hop: int
    group: int
    chunk: int
    span: Span


def _pieces(problem: AllGatherGemm, config: Config) -> list[list[Piece]]:
    """The pieces of each comm program in order: every comm-th piece. With `across` a rank also sends to itself."""
    world, rows, pieces, size = problem.world_size, problem.shard_rows, config["pieces"], config["chunk_rows"]
    groups, chunks = _k_groups(problem, config), ceil_div(rows, size)
    parts, across = chunks * len(groups), int(config.values.get("across", 0))

    def piece(unit: int) -> Piece:
        what = tiling.push_unit(unit, parts, pieces, world + across, config["order"] == "interleaved")
        part = what // pieces % parts
        first = part % chunks * size + what % pieces * (size // pieces)
        span = _block(problem, (min(first, rows), min(first + size // pieces, rows)), groups[part // chunks])
        return Piece(what // pieces // parts, part // chunks, part % chunks, span)

    units = (world - 1 + across) * parts * pieces
    comm, comm_dies = config["comm"], int(config.values.get("comm_dies", 1))
    senders = [tiling.chiplet(program, comm, comm_dies) for program in range(comm)]
    return [[piece(unit) for unit in range(sender, units, comm)] for sender in senders]


def _chunk(problem: AllGatherGemm, config: Config, source: int, group: int, chunk: int) -> Flag:
    """The flag of a K group of a chunk of rows."""
    return "chunk", (group * problem.world_size + source) * ceil_div(problem.shard_rows, config["chunk_rows"]) + chunk


def _push(problem: AllGatherGemm, config: Config, rank: int) -> Iterator[Task]:
    """Comm programs, in the computing kernel or in one before or beside it, write their pieces and wait for nobody."""
    for program in _pieces(problem, config):
        flags = [_chunk(problem, config, rank, piece.group, piece.chunk) for piece in program]
        peers = [(rank + piece.hop) % problem.world_size for piece in program]
        yield Task(sends=tuple(Send(peer, flag, piece.span) for peer, flag, piece in zip(peers, flags, program, strict=True)))


def _copy(problem: AllGatherGemm, config: Config, rank: int) -> Iterator[Task]:
    """open_call waits until all inboxes are free; then the copy engines send, the peers shared out among streams."""
    world, rows, cols, size = problem.world_size, problem.shard_rows, problem.shard_cols, config["chunk_rows"]
    peers, chunks = [(rank + hop) % world for hop in range(1, world)], ceil_div(rows, size)
    yield Task(waits=tuple(Wait(peer, ("finished", peer), 1, ago=1) for peer in peers))
    spans = [(chunk * size * cols, min((chunk + 1) * size, rows) * cols) for chunk in range(chunks)]
    streams = min(config["streams"], len(peers))
    for peer in (peer for stream in range(streams) for peer in peers[stream::streams]):
        yield Task(sends=tuple(Send(peer, ("chunk", rank * chunks + chunk), span) for chunk, span in enumerate(spans)))


def _publish(problem: AllGatherGemm, _: Config, rank: int) -> Iterator[Task]:
    """Every program copies its part of the shard into the heap, where all peers read it, and signals each of them."""
    world, size = problem.world_size, problem.shard_rows * problem.shard_cols
    part = ceil_div(size, PUBLISHERS * PART_ALIGNMENT) * PART_ALIGNMENT
    for start in range(0, PUBLISHERS * part, part):
        span = (start, min(start + part, size))
        yield Task(sends=tuple(Send((rank + hop) % world, ("shard", rank), span) for hop in range(1, world)))


DELIVERIES = {"push": _push, "push_two_kernel": _push, "copy_engine": _copy, "pull": _publish}
"""The way in which each variant brings remote shards to the GEMM."""


def _gather(problem: AllGatherGemm, config: Config, rank: int) -> Iterator[Task]:
    """For the vendor's products. First a rank says that it has begun; then, once all have (which is the least that a slot
    used twice running asks for), each comm program sends its part, or the copy engines all.
    """
    world, rows, cols, comm = problem.world_size, problem.shard_rows, problem.shard_cols, config["comm"] or 1
    peers, size = [(rank + hop) % world for hop in range(1, world)], rows * cols
    begun = tuple(Wait(peer, ("begun", peer), 1) for peer in peers)
    yield Task(sends=tuple(Send(peer, ("begun", rank)) for peer in peers))
    part = ceil_div(rows, comm) * cols if problem.shard == "k" else ceil_div(size, comm * PART_ALIGNMENT) * PART_ALIGNMENT
    if pieces := _pieces_of_last(problem, config):
        yield Task(begun, sends=tuple(Send(peer, ("shard", rank), (0, size)) for peer in peers[:-1]))
        for piece, (top, bottom) in enumerate(pieces):
            yield Task(begun, sends=(Send(peers[-1], ("shard", piece * world + rank), (top * cols, bottom * cols)),))
        return
    for start in range(0, comm * part, part):
        span = (min(start, size), min(start + part, size))
        yield Task(begun, sends=tuple(Send(peer, ("shard", rank), span) for peer in peers))


def _pieces_of_last(problem: AllGatherGemm, config: Config) -> list[Span]:
    """The pieces of the shard that comes last, as rows; none where it is sent like the others."""
    pieces = last_pieces(problem.shard_rows, config["products"])
    return pieces if len(pieces) > 1 else []


def _products(problem: AllGatherGemm, config: Config, rank: int) -> Iterator[Task]:
    world, rows, size = problem.world_size, problem.shard_rows, problem.shard_rows * problem.shard_cols
    if config["products"] != "one":
        yield Task(rows=(rank * rows, min((rank + 1) * rows, problem.m)), columns=(0,))
    later, pieces = tiling.later_products(rank, world, config["products"]), _pieces_of_last(problem, config)
    for hops, (first, end) in later[:-1] if pieces else later:
        arrived = [(rank - hop) % world for hop in range(*hops)]
        waits = tuple(Wait(source, ("shard", source), config["comm"] or 1) for source in arrived)
        reads = tuple((source, (0, size)) for source in range(first, end) if source != rank)
        span = (first * rows, min(end * rows, problem.m)) if problem.shard == "m" else (0, problem.m)
        yield Task(waits, reads, span, (0,))
    for piece, (top, bottom) in enumerate(pieces):
        source, cols = later[-1].sources[0], problem.shard_cols
        wait = Wait(source, ("shard", piece * world + source), 1)
        span = (source * rows + top, min(source * rows + bottom, problem.m))
        yield Task((wait,), ((source, (top * cols, bottom * cols)),), span, (0,))


def _gemm(problem: AllGatherGemm, config: Config, rank: int, own: Walk, remote: Walk) -> Iterator[Task]:
    """The rows of tiles, with the tiles of the rank's shard first. The first tile of a row waits for the data of the whole row.

    With shard k all tiles count as local, and each row of tiles needs every source.
    """
    world, rows, block = problem.world_size, problem.shard_rows, config["block_m"]
    ring = [(rank - step) % world for step in range(1, world)] if problem.shard == "k" else []
    m_tiles, base = ceil_div(rows, block), rank * rows if problem.shard == "m" else 0
    if config.values.get("across"):
        for band, columns in remote.items():
            yield from _tiles_across(problem, config, (band * block, min(band * block + block, world * rows)), columns)
        return
    for band, columns in own.items():
        yield from _tiles(problem, config, (band * block, min(band * block + block, rows)), ring, base, columns)
    for place, columns in remote.items():
        step, band = divmod(tiling.remote_row(place, m_tiles, world, config["order"] == "interleaved"), m_tiles)
        source, span = (rank - step) % world, (band * block, min(band * block + block, rows))
        yield from _tiles(problem, config, span, [source], source * rows, columns)


def _tiles(
    problem: AllGatherGemm, config: Config, rows: Span, sources: list[int], base: int, columns: list[int]
) -> Iterator[Task]:
    """Waits for and reads these rows of each source, one K group at a time, then writes them below row `base` of C."""
    groups = _k_groups(problem, config)
    for source in sources:
        for group, cols in enumerate(groups):
            waits = tuple(_arrival(problem, config, source, rows, group))
            yield Task(waits, reads=((source, _block(problem, rows, cols)),))
    yield Task(rows=(base + rows[0], min(base + rows[1], problem.m)), columns=columns)


def _tiles_across(problem: AllGatherGemm, config: Config, rows: Span, columns: list[int]) -> Iterator[Task]:
    """Like `_tiles`, for a row of tiles that may lie across several shards, the rank's shard included."""
    size = problem.shard_rows
    for group, cols in enumerate(_k_groups(problem, config)):
        waits: tuple[Wait, ...] = ()
        reads = []
        for source in range(rows[0] // size, (rows[1] - 1) // size + 1):
            part = max(rows[0] - source * size, 0), min(rows[1] - source * size, size)
            waits += tuple(_arrival(problem, config, source, part, group))
            reads.append((source, _block(problem, part, cols)))
        yield Task(waits, tuple(reads))
    yield Task(rows=(rows[0], min(rows[1], problem.m)), columns=columns)


def _arrival(problem: AllGatherGemm, config: Config, source: int, rows: Span, group: int) -> Iterator[Wait]:
    """The waits behind which these rows of a K group may be read."""
    if config.variant == "pull":
        yield Wait(source, ("shard", source), PUBLISHERS)
        return
    size = config["chunk_rows"]
    signals = int(config.values.get("pieces", 1))
    for chunk in range(rows[0] // size, (rows[1] - 1) // size + 1):
        yield Wait(source, _chunk(problem, config, source, group, chunk), signals)


# Flash Decode: the output, and what is exchanged, are rows (query heads of all query tokens), in blocks that one program merges.


def _flash_decode(problem: FlashDecode, config: Config) -> Plan:
    rows, world, heads = problem.out_rows, problem.world_size, config["heads"]
    ranks, spans = range(world), [(first, first + heads) for first in range(0, rows, heads)]
    if config.variant == "bsp":  # the collective library exchanges
        return Plan([[Task(rows=span, columns=(0,)) for span in spans]] * world, rows)
    if config.variant in ("gather", "fine_grained"):
        return Plan([list(_bulk(problem, config, rank, spans)) for rank in ranks], rows, shard=rows, to_itself=True)
    # One launch pushes and the next receives, or (where all programs run at once) one phase and the next.
    all_rows = problem.rows
    merged, pushed, received = heads, list(range(all_rows // heads)), list(range(len(spans)))
    if config.variant == "single":  # whoever finishes an item pushes it; receivers take every n-th block of rows
        merged, pushed = problem.group, _finishing_order(problem, config)
        received = [block for first in range(config["receivers"]) for block in received[first :: config["receivers"]]]

    def push(rank: int, index: int) -> Task:
        """With LL each word shows its arrival, which the plan models as a flag after each block of rows."""
        owner, first = divmod(index * merged, rows)  # rows of an owner stand together; with `replicated` there is one, all ranks
        flag, span = ("rows", rank * (rows // merged) + first // merged), (first, first + merged)
        peers = [owner] if problem.output == "head_scatter" else [(rank + hop) % world for hop in range(1, world + 1)]
        return Task(sends=tuple(Send(peer, flag, span) for peer in peers))

    def receive(rank: int, index: int) -> Task:
        sources, block = [(rank - hop) % world for hop in range(world)], spans[index][0] // merged
        waits = tuple(Wait(source, ("rows", source * (rows // merged) + block), 1) for source in sources)
        return Task(waits, tuple((source, spans[index]) for source in sources), spans[index], (0,))

    tasks = [[push(rank, i) for i in pushed] + [receive(rank, i) for i in received] for rank in ranks]
    return Plan(tasks, rows, shard=rows, to_itself=True)


def _bulk(problem: FlashDecode, config: Config, rank: int, spans: list[Span]) -> Iterator[Task]:
    """The push of whole results, whose last sender to each rank waits too with `gather`; then the merge of each block."""
    rows, world, senders = problem.out_rows, problem.world_size, config["senders"]
    per, alone = ceil_div(rows, senders), config.variant == "fine_grained"
    arrived = {source: Wait(source, ("source", source), senders) for source in ((rank - hop) % world for hop in range(world))}
    for hop in range(1, world + 1):
        for part in range(senders):
            span = (min(part * per, rows), min(part * per + per, rows))
            yield Task(sends=(Send((rank + hop) % world, ("source", rank), span),))
        if not alone:
            yield Task((arrived[(rank - hop) % world],))
    for span in spans:
        yield Task(tuple(arrived.values()), tuple((source, span) for source in arrived), span, (0,))


def attended(problem: FlashDecode, config: Config) -> list[tuple[int, int]]:
    """The (item, split) of each split program, in program order; an item is a KV head of a sequence."""
    items, splits = problem.batch * problem.kv_heads, config["splits"]
    programs, chiplets = range(items * splits), config["chiplets"]
    if config["order"] == "split_first":
        return [(tiling.chiplet(program % items, items, chiplets), program // items) for program in programs]
    return [divmod(tiling.chiplet(program, items * splits, chiplets), splits) for program in programs]


def _finishing_order(problem: FlashDecode, config: Config) -> list[int]:
    """Items, by the place of their results, in the order in which their last split is done."""
    last = {item: program for program, (item, _) in enumerate(attended(problem, config))}
    return [place(problem, item * problem.group) // problem.group for item in sorted(last, key=last.__getitem__)]


def place(problem: FlashDecode, row: int) -> int:
    """The position of the partial results of a row."""
    if problem.output == "replicated":
        return row
    return tiling.place(row, problem.rows, problem.q_heads * problem.queries, problem.out_heads * problem.queries)


def tokens(length: int, config: Config) -> list[Span]:
    """The tokens of a sequence that each split attends to."""
    per = tokens_per_split(length, config["block_s"], config["splits"])
    return [(split * per, min(split * per + per, length)) for split in range(config["splits"])]


def _attention_fault(problem: FlashDecode, config: Config) -> str | None:
    splits, programs = config["splits"], attended(problem, config)
    wanted = {(item, split) for item in range(problem.batch * problem.kv_heads) for split in range(splits)}
    if lost := wanted - set(programs):
        return f"{len(lost)} of {len(wanted)} pieces of the cache are never attended, first (item, split) {min(lost)}"
    if problem.output == "head_scatter" and (fault := _owner_fault(problem)):
        return fault
    for length in _telling_lengths(problem.shard_len, config["block_s"], config["block_s"] * splits):
        if fault := uneven(tokens(length, config), length):
            return f"tokens of a sequence of {length}: {fault}"
    return None


def _owner_fault(problem: FlashDecode) -> str | None:
    """Whether each row stands where its owner expects it: row (sequence, own row) of those of the rank."""
    own = problem.out_heads * problem.queries
    for row in range(problem.rows):
        sequence, head = divmod(row, problem.q_heads * problem.queries)
        rank, at = divmod(place(problem, row), problem.out_rows)
        if divmod(head, own) != (rank, at % own) or sequence != at // own:
            return f"row {head} of sequence {sequence} goes astray, to row {at} of rank {rank}"
    return None


def _telling_lengths(longest: int, block: int, whole: int) -> list[int]:
    """All lengths of a short shard; of a long one those around the multiples at which splits get another block."""
    near = (0, block, whole, longest // whole * whole, longest // 3, longest)
    lengths = {at + by for at in near for by in (-1, 0, 1)} | set(range(64))
    return sorted(length for length in lengths if 0 <= length <= longest)


def tokens_per_split(length: int, block_s: int, splits: int) -> int:
    """Tokens that one split attends to; whole blocks, so that only the last block of a sequence is masked."""
    return ceil_div(ceil_div(length, block_s), splits) * block_s
