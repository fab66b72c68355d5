"""Plans of `push_specialized`, `push_words` and `push_packets`: see `schedule`."""

from __future__ import annotations

from collections.abc import Iterator

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS, K_ALIGNMENT
from autotax.operators.problems import AllGatherGemm
from tests.models.plan import Flag, Plan, Send, Span, Task, Wait, walk


def specialized_plan(problem: AllGatherGemm, config: Config) -> Plan:
    """Spans are of strips of BLOCK_K columns, one below the other."""
    tasks = [[*_sends(problem, config, rank), *_tiles(problem, config, rank)] for rank in range(problem.world_size)]
    strips = ceil_div(problem.shard_cols, BLOCK_K)
    return Plan(tasks, problem.m, ceil_div(problem.n, config["block_n"]), problem.shard_rows * strips)


def words_plan(problem: AllGatherGemm, config: Config) -> Plan:
    """A K group is a span of all rows of a shard. Tiles wait until a K group of all shards has been received."""
    world, rows, groups = problem.world_size, problem.shard_rows, config["k_groups"]
    m_tiles, n_tiles = ceil_div(problem.m, config["block_m"]), ceil_div(problem.n, config["block_n"])
    tasks = []
    for rank in range(world):
        peers = [(rank + hop) % world for hop in range(1, world)]
        own = [
            Task(sends=tuple(Send(peer, ("words", group * world + rank), (group * rows, (group + 1) * rows)) for peer in peers))
            for group in range(groups)
        ]
        for place, columns in walk(m_tiles, n_tiles, tiling.BLOCKS_BELOW_EACH_OTHER).items():
            for group in range(groups):
                waits = tuple(Wait(peer, ("words", group * world + peer), 1) for peer in peers)
                own.append(Task(waits, tuple((peer, (group * rows, (group + 1) * rows)) for peer in peers)))
            first = place * config["block_m"]
            own.append(Task(rows=(first, min(first + config["block_m"], problem.m)), columns=columns))
        tasks.append(own)
    return Plan(tasks, problem.m, n_tiles, rows * groups)


def packets_plan(problem: AllGatherGemm, config: Config) -> Plan:
    """LL words have no flag: a signal models each piece of a shard. Tiles wait until all pieces have been received."""
    world, size = problem.world_size, problem.shard_rows * problem.shard_cols * problem.item_size // 4
    parts = ceil_div(size, config["piece"])
    m_tiles, n_tiles = ceil_div(problem.m, config["block_m"]), ceil_div(problem.n, config["block_n"])

    def span(unit: int) -> Span:
        first = unit % parts * config["piece"]
        return first, min(first + config["piece"], size)

    tasks = []
    for rank in range(world):
        own = []
        for unit in range(world * parts):
            peer = (rank + 1 + unit // parts) % world
            if peer != rank:
                own.append(Task(sends=(Send(peer, ("piece", rank * parts + unit % parts), span(unit)),)))
        for unit in range((world - 1) * parts):
            source = (rank + world - 1 - unit // parts) % world
            own.append(Task((Wait(source, ("piece", source * parts + unit % parts), 1),), ((source, span(unit)),)))
        for place, columns in walk(m_tiles, n_tiles, config["group_m"]).items():
            first = place * config["block_m"]
            own.append(Task(rows=(first, min(first + config["block_m"], problem.m)), columns=columns))
        tasks.append(own)
    return Plan(tasks, problem.m, n_tiles, size)


def _span_of_a_group(problem: AllGatherGemm, config: Config) -> int:
    """Columns of a K group."""
    return ceil_div(problem.shard_cols - config["by_words"], config["k_groups"] * K_ALIGNMENT) * K_ALIGNMENT


def _flag(problem: AllGatherGemm, config: Config, group: int, source: int, chunk: int) -> Flag:
    return "chunk", (group * problem.world_size + source) * ceil_div(problem.shard_rows, config["chunk_rows"]) + chunk


def _sends(problem: AllGatherGemm, config: Config, rank: int) -> Iterator[Task]:
    """Senders wait for no other rank; each box is a task. The plan has a signal for each counted box: the program that counts the
    last box signals all ranks. LL words have no flag; one signal models the wait until all words are received.
    """
    rows, chunk, words = problem.shard_rows, config["chunk_rows"], config["by_words"] // BLOCK_K
    strips = ceil_div(problem.shard_cols, BLOCK_K) - words
    peers = [(rank + hop) % problem.world_size for hop in range(1, problem.world_size)]
    if words:
        yield Task(sends=tuple(Send(peer, ("words", rank), (0, words * rows)) for peer in peers))
    for number in range(rows // GROUP_ROWS * strips):
        row, strip = tiling.box_row(number, rows, strips, chunk), tiling.box_strip(number, rows, strips, chunk)
        flag = _flag(problem, config, strip * BLOCK_K // _span_of_a_group(problem, config), rank, row // chunk)
        first = (words + strip) * rows + row
        span = (first, first + GROUP_ROWS)
        yield Task(sends=tuple(Send(peer, flag, span) for peer in peers))


def _spans(strip: int, end_strip: int, rows: int, first: int, end: int) -> list[Span]:
    """The spans of rows `first` to `end` in strips. Spans of whole strips are contiguous."""
    if (first, end) == (0, rows):
        return [(strip * rows, end_strip * rows)]
    return [(index * rows + first, index * rows + end) for index in range(strip, end_strip)]


def _tiles(problem: AllGatherGemm, config: Config, rank: int) -> Iterator[Task]:
    """The rows of tiles in the order of their first tile."""
    world, rows, block = problem.world_size, problem.shard_rows, config["block_m"]
    n_tiles, interleaved = ceil_div(problem.n, config["block_n"]), config["order"] == "interleaved"
    if rows % block:
        m_tiles = problem.m // block
        for place, columns in walk(m_tiles, n_tiles, config["group_m"]).items():
            yield from _tile(problem, config, rank, (place + rank * rows // block) % m_tiles * block, columns)
        return
    m_tiles = rows // block
    for place, columns in walk(m_tiles, n_tiles, config["group_m"]).items():
        yield from _tile(problem, config, rank, rank * rows + place * block, columns)
    for place, columns in walk((world - 1) * m_tiles, n_tiles, config["group_m"]).items():
        step, band = divmod(tiling.remote_row(place, m_tiles, world, interleaved), m_tiles)
        yield from _tile(problem, config, rank, (rank - step) % world * rows + band * block, columns)


def _tile(problem: AllGatherGemm, config: Config, rank: int, row: int, columns: list[int]) -> Iterator[Task]:
    """Waits for the words, then K group by K group, for the rows of other shards that a tile has, reads them, writes its rows."""
    rows, block, chunk, words = problem.shard_rows, config["block_m"], config["chunk_rows"], config["by_words"] // BLOCK_K
    cols = problem.shard_cols - config["by_words"]
    width = _span_of_a_group(problem, config)
    for group in range(-1 if words else 0, ceil_div(cols, width)):
        waits: list[Wait] = []
        reads: list[tuple[int, Span]] = []
        strips = (group * width // BLOCK_K, ceil_div(min((group + 1) * width, cols), BLOCK_K)) if group >= 0 else (-words, 0)
        for source in range(row // rows, (row + block - 1) // rows + 1):
            if source != rank:
                first, end = max(row - source * rows, 0), min(row + block - source * rows, rows)
                if group < 0:
                    waits.append(Wait(source, ("words", source), 1))
                else:
                    for part in range(first // chunk, (end - 1) // chunk + 1):
                        need = tiling.boxes_of(group, part, rows, cols, width, chunk)
                        waits.append(Wait(source, _flag(problem, config, group, source, part), need))
                reads += [(source, span) for span in _spans(words + strips[0], words + strips[1], rows, first, end)]
        yield Task(tuple(waits), tuple(reads))
    yield Task(rows=(row, row + block), columns=columns)
