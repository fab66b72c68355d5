"""Plans of the variants of GEMM + Reduce-Scatter (see `schedule`), and the check of the words that `words` exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels import tiling
from autotax.operators import named
from autotax.operators.problems import GemmReduceScatter
from tests.models.plan import Flag, Plan, Send, Task, Wait, faults, uneven, walk

PROCESSORS = 4
"""Programs of a launch: few, so that many waves are enumerated."""
ADDED_ROWS, LINE = 16, 64
"""Rows that `decomposed` adds up at a time, and rows of sums that share a flag there."""
PIECE_WORDS = 1024
GRAIN = 256
"""Elements by which slices of `two_kernel` are rounded up."""


MOST_STEPS = 20_000


def check(problem: GemmReduceScatter, config: Config) -> str | None:
    """Describes the fault of a config in one line, or returns None. None may also mean too many steps to enumerate."""
    if config.variant == "two_kernel":
        return slices_fault(problem, config)
    if config.variant == "two_kernel_words":
        return shares_fault(problem, config)
    if config.variant == "specialized_words":
        return tiles_fault(problem, config)
    if config.variant == "words":
        small = problem.world_size * problem.world_size * problem.m * problem.n <= 40 * MOST_STEPS
        return (cut_fault(problem, config) or words_fault(problem, config)) if small else None
    rows, cols = (int(config.values.get(name, ADDED_ROWS)) for name in ("block_m", "block_n"))
    if problem.world_size**2 * ceil_div(problem.out_rows, rows) * ceil_div(problem.n, cols) > MOST_STEPS:
        return None
    fault = cut_fault(problem, config) if config.variant in ("push", "pull_reduce") else None
    return fault or faults(reduce_plan(problem, config))


def reduce_plan(problem: GemmReduceScatter, config: Config) -> Plan:
    """The plan of a call. Raises KeyError for `words`, which needs no plan: receivers poll the words themselves."""
    world = problem.world_size
    if config.variant in ("bsp", *named(problem.op).peers):  # the vendor's GEMM computes, the library exchanges
        return Plan([[Task(rows=(0, problem.out_rows), columns=(0,))] for _ in range(world)], problem.out_rows)
    if config.variant == "push_one_shot":
        tasks, height, units = _specialized(problem, config)
        return Plan(tasks, problem.out_rows, ceil_div(problem.n, config["block_n"]), units)
    plans = {"push": _fused, "pull_reduce": _fused, "push_specialized": _specialized, "decomposed": _decomposed}
    tasks, height, units = plans[config.variant](problem, config)
    lines = ceil_div(problem.shard_rows, height)
    columns = ceil_div(problem.n, config["block_n"]) if config.variant != "decomposed" else 1
    replicated = problem.output == "replicated"
    if replicated:
        for rank, own in enumerate(tasks):
            own += _received(problem, rank, height, units, lines, columns)
    return Plan(tasks, problem.out_rows, columns, units + (lines if replicated else 0), to_itself=not in_epilogue(config))


def tiles_fault(problem: GemmReduceScatter, config: Config) -> str | None:
    """Checks that tiles of `specialized_words` hold all rows of padding, and that each part along K has a block."""
    tile = tiling.ProductTile.of(config["product"])
    rows = problem.m if problem.output == "replicated" else problem.world_size * problem.shard_rows
    if ceil_div(problem.m, tile.rows) * tile.rows < rows:
        return f"{rows} rows are more than the tiles have"
    if ceil_div(problem.k, tiling.BLOCK_K) < config["splits"]:
        return "a part has no block of K"
    return None


def slices_fault(problem: GemmReduceScatter, config: Config) -> str | None:
    """Checks that the slices of `two_kernel` cover the rows of a rank once. Each waits for the same slice of the other ranks."""
    size, programs, parts = problem.out_rows * problem.n, PROCESSORS * config["waves"], config["parts"]
    step = ceil_div(ceil_div(size, programs * parts), GRAIN) * GRAIN
    starts = [(part * programs + program) * step for part in range(parts) for program in range(programs)]
    covered = [element for start in starts for element in (start, min(start + step, size)) if start < size]
    return None if covered[::2] == [0, *covered[1:-1:2]] and covered[-1] == size else f"slices are {covered}"


def shares_fault(problem: GemmReduceScatter, config: Config) -> str | None:
    """Checks that `two_kernel_words` has room for its shares, and that a rank stores every element of its output once."""
    per = (8 if config["words"] == "blank" else 4) // problem.item_size
    words, world = problem.m * problem.n // per, problem.world_size
    scattered = problem.output == "scattered"
    parts = world if scattered or config["shots"] == "two" else 1
    share = problem.shard_rows * problem.n // per if scattered else ceil_div(words, parts)
    if not scattered and parts > 1:
        share = ceil_div(share, 2) * 2
    if share > ceil_div(ceil_div(words, parts) if not scattered else share, 16) * 16:
        return f"a share of {share} words is more than its room"
    if problem.m * problem.n % per:
        return "a word is cut"
    size = problem.out_rows * problem.n
    spans = [(part * share * per, min((part + 1) * share * per, size)) for part in range(1 if scattered else parts)]
    covered = [element for first, end in spans if first < size for element in (first, end)]
    return None if covered[::2] == [0, *covered[1:-1:2]] and covered[-1] == size else f"shares are {covered}"


def cut_fault(problem: GemmReduceScatter, config: Config) -> str | None:
    """Checks that every tile of the partial sum is computed once over all of K, by one program or in parts."""
    workers = _workers(config)
    m_tiles = _tiles_of_rank(problem, config)
    n_tiles, splits = ceil_div(problem.n, config["block_n"]), config["splits"]
    blocks = ceil_div(problem.k, config["block_k"])
    whole = tiling.whole_tiles(m_tiles * n_tiles, workers, splits)
    spans: dict[int, list[tuple[int, int]]] = {tile: [] for tile in range(m_tiles * n_tiles)}
    for item in range(tiling.pieces(m_tiles * n_tiles, whole, splits)):
        first, last = (get(item, whole, splits, blocks) for get in (tiling.first_block, tiling.last_block))
        spans[tiling.tile_of(item, whole, splits)].append((first, last))
    if m_tiles * n_tiles - whole > workers - 1 and splits > 1:
        return "more tiles are cut than there is room for"
    faults = ((tile, uneven(ranges, blocks)) for tile, ranges in spans.items())
    return next((f"blocks of K of tile {tile}: {fault}" for tile, fault in faults if fault), None)


def _workers(config: Config) -> int:
    """Programs that compute: at least one beside the adders."""
    adders = int(config.values.get("adders", 0))
    return max(PROCESSORS, adders + 1) - adders


def _tiles_of_rank(problem: GemmReduceScatter, config: Config) -> int:
    """Rows of tiles that a rank computes."""
    if config.variant != "words":
        return problem.world_size * ceil_div(problem.shard_rows, config["block_m"])
    rows = problem.world_size * problem.shard_rows if problem.output == "scattered" else problem.m
    return ceil_div(rows, config["block_m"])


def _tiles(problem: GemmReduceScatter, config: Config, rank: int) -> Iterator[tuple[int, int, int]]:
    """The (owner, row of tiles, tile of the row) that the programs of a rank compute, program after program."""
    world, group = problem.world_size, config["group_m"]
    m_tiles, n_tiles = ceil_div(problem.shard_rows, config["block_m"]), ceil_div(problem.n, config["block_n"])
    remote, tiles = (world - 1) * m_tiles * n_tiles, world * m_tiles * n_tiles
    workers, splits = _workers(config), int(config.values.get("splits", 1))
    whole = tiling.whole_tiles(tiles, workers, splits)
    for worker in range(workers):
        for item in range(worker, tiling.pieces(tiles, whole, splits), workers):
            if item >= whole and (item - whole) % splits != splits - 1:
                continue  # in program order the last part of a tile finds the others there
            tile = tiling.tile_of(item, whole, splits)
            theirs = tile < remote
            rows = (world - 1) * m_tiles if theirs else m_tiles
            place = tiling.grouped(tile if theirs else tile - remote, rows, n_tiles, group)
            position = place // n_tiles
            if theirs:
                position = tiling.remote_row(position, m_tiles, world, config["order"] == "interleaved")
            yield (rank + position // m_tiles) % world, position % m_tiles, place % n_tiles


def _fused(problem: GemmReduceScatter, config: Config) -> tuple[list[list[Task]], int, int]:
    """`push` and `pull_reduce`: programs count finished tiles, then signal them; the plan has one signal for each tile.

    Spans are of tiles. Several programs may compute parts of a tile, and any of them may finish last. The plan assumes the
    latest signal that is possible: by the last program.
    """
    world, height, per = problem.world_size, config["block_m"], config["flag_tiles"]
    m_tiles, n_tiles = ceil_div(problem.shard_rows, height), ceil_div(problem.n, config["block_n"])
    groups = ceil_div(n_tiles, per)

    def flag(source: int, block: int, tile: int) -> Flag:
        return "tiles", (source * m_tiles + block) * groups + tile // per

    tasks: list[list[Task]] = []
    for rank in range(world):
        own = []
        for owner, block, tile in _tiles(problem, config, rank):
            unit = block * n_tiles + tile
            own.append(Task(sends=(Send(owner, flag(rank, block, tile), (unit, unit + 1)),)))
        for block, columns in walk(m_tiles, n_tiles, config["group_m"]).items():
            for tile in columns:
                need = min(per, n_tiles - tile // per * per)
                unit = block * n_tiles + tile
                waits = tuple(Wait(source, flag(source, block, tile), need) for source in _order(rank, world))
                own.append(Task(waits, tuple((source, (unit, unit + 1)) for source in range(world))))
            own.append(_added(problem, rank, block, height, columns, m_tiles * n_tiles))
        tasks.append(own)
    return tasks, height, m_tiles * n_tiles


def _specialized(problem: GemmReduceScatter, config: Config) -> tuple[list[list[Task]], int, int]:
    """Senders wait for nobody; adders take pieces of some rows, each behind the flags of all ranks for its tile.

    In the epilogue a rank adds to each of its own tiles what its peers have sent. In `push_one_shot` all ranks add up all rows.
    """
    world, height, rows = problem.world_size, config["block_m"], problem.out_rows
    m_tiles, n_tiles = ceil_div(rows, height), ceil_div(problem.n, config["block_n"])
    tall = ADDED_ROWS if config["polls"] == "piece" else (8192 if world <= 2 else 4096) // config["block_n"]
    down = height // tall

    def flag(source: int, block: int, tile: int) -> Flag:
        return "tiles", (block * n_tiles + tile) * world + source

    tasks: list[list[Task]] = []
    for rank in range(world):
        own = []
        columns: dict[tuple[int, int], list[int]] = {}  # of tiles that are added up, by the rows of a piece
        # Programs run side by side, one a processor, and each computes the tiles of others first.
        everywhere = config.variant == "push_one_shot"
        tiles = product(range(world), range(m_tiles), range(n_tiles)) if everywhere else _tiles(problem, config, rank)
        for owner, block, tile in sorted(tiles, key=lambda tile: tile[0] == rank):
            span = (block * n_tiles + tile, block * n_tiles + tile + 1)
            if owner != rank or not in_epilogue(config):
                own.append(Task(sends=(Send(owner, flag(rank, block, tile), span),)))
                continue
            peers = _order(rank, world)[:-1]
            waits = tuple(Wait(peer, flag(peer, block, tile), 1) for peer in peers)
            own.append(Task(waits, tuple((peer, span) for peer in peers)))
            columns.setdefault((block * height, (block + 1) * height), []).append(tile)
        pieces = 0 if in_epilogue(config) else m_tiles * n_tiles * down
        for piece in (piece for program in range(PROCESSORS) for piece in range(program, pieces, PROCESSORS)):
            block, tile = divmod(tiling.grouped(piece // down, m_tiles, n_tiles, config["group_m"]), n_tiles)
            unit = block * n_tiles + tile
            waits = tuple(Wait(source, flag(source, block, tile), 1) for source in range(world))
            own.append(Task(waits, tuple((source, (unit, unit + 1)) for source in range(world))))
            first = block * height + piece % down * tall
            columns.setdefault((first, first + tall), []).append(tile)
        for (first, last), tiles in columns.items():
            own.append(Task(rows=(min(first, rows), min(last, rows)), columns=tiles))
        tasks.append(own)
    return tasks, height, m_tiles * n_tiles


def in_epilogue(config: Config) -> bool:
    """Whether the product of a rank's own tile adds what the peers have sent."""
    return config.values.get("adds") == "epilogue"


def _order(rank: int, world: int) -> list[int]:
    """The ranks in the order in which `rank` waits for them; `rank` itself is the last."""
    return [(rank - hop) % world for hop in range(1, world + 1)]


def _added(problem: GemmReduceScatter, rank: int, line: int, height: int, columns: list[int], units: int) -> Task:
    """Adds up and stores a line of rows. With a replicated output the rank sends the line to all ranks, itself included."""
    rows = (line * height, min((line + 1) * height, problem.shard_rows))
    if problem.output == "scattered":
        return Task(rows=rows, columns=columns)
    base, world = rank * problem.shard_rows, problem.world_size
    lines = ceil_div(problem.shard_rows, height)
    flag = ("sums", rank * lines + line)
    sends = tuple(Send((rank + hop) % world, flag, (units + line, units + line + 1)) for hop in range(1, world + 1))
    return Task(rows=(min(base + rows[0], problem.m), min(base + rows[1], problem.m)), columns=columns, sends=sends)


def _received(problem: GemmReduceScatter, rank: int, height: int, units: int, lines: int, columns: int) -> Iterator[Task]:
    world, rows = problem.world_size, problem.shard_rows
    for source, line in product(_order(rank, world), range(lines)):
        wait = Wait(source, ("sums", source * lines + line), 1)
        first, last = (min(source * rows + min(at * height, rows), problem.m) for at in (line, line + 1))
        span = (units + line, units + line + 1)
        if source == rank:
            yield Task((wait,), ((source, span),))
        else:
            yield Task((wait,), ((source, span),), (first, last), range(columns))


def _decomposed(problem: GemmReduceScatter, config: Config) -> tuple[list[list[Task]], int, int]:
    """Spans are of rows. A rank sends the rows that it keeps to itself."""
    world, rows = problem.world_size, problem.shard_rows
    pieces = 2 if config["products"] == "halves" else 1
    high = ceil_div(ceil_div(rows, pieces), ADDED_ROWS) * ADDED_ROWS
    tasks: list[list[Task]] = []
    for rank in range(world):
        spans = [(min(piece * high, rows), min((piece + 1) * high, rows)) for piece in range(pieces)]
        own = [
            Task(sends=(Send((rank + hop) % world, ("rows", piece * world + rank), span),))
            for hop in range(1, world + 1)
            for piece, span in enumerate(spans)
        ]
        for line in range(ceil_div(rows, LINE)):
            for row in range(line * LINE, min((line + 1) * LINE, rows), ADDED_ROWS):
                waits = tuple(Wait(source, ("rows", row // high * world + source), 1) for source in _order(rank, world))
                span = (row, min(row + ADDED_ROWS, rows))
                own.append(Task(waits, tuple((source, span) for source in range(world))))
            own.append(_added(problem, rank, line, LINE, [0], rows))
        # Senders signal empty pieces, too, so a task has to wait for these signals.
        both = product(range(pieces), range(world))
        own.append(Task(tuple(Wait(source, ("rows", piece * world + source), 1) for piece, source in both)))
        tasks.append(own)
    return tasks, LINE, rows


# Words


Cell = tuple[int, int]
"""A row and a word of it."""


def words_fault(problem: GemmReduceScatter, config: Config) -> str | None:
    """Checks that a rank reads exactly the words that it is sent, once each, and writes the whole output."""
    two = config["payload"] != "fp32"
    width, sum_width = ceil_div(problem.n, 1 + two), ceil_div(problem.n, 1 + (problem.item_size == 2))
    written: Counter[Cell] = Counter()
    height = _height(problem)
    for rank in range(problem.world_size):
        pieces = _added_pieces(problem, config, rank, two)
        read = Counter(cell for piece in pieces for cell in _cells(piece, height, width))
        sent = Counter(sent_cells(problem, config, rank, two, width))
        if read != sent:
            return f"rank {rank} is sent {len(sent)} words of each rank and reads {len(read)}"
        written += Counter({(row, _tile_of(word, config, two)): 1 for row, word in read})
    if problem.output == "replicated" and config["shots"] == "two":
        tiles = ceil_div(problem.n, config["block_n"])
        if written != Counter(product(range(problem.m), range(tiles))):
            return "not every tile is added up by one rank"
        pieces = _pieces(problem.m, sum_width, *_piece(problem, config, two))
        whole = Counter(cell for piece in pieces for cell in _cells(piece, problem.m, sum_width))
        return None if whole == Counter(product(range(problem.m), range(sum_width))) else "not all sums are received once"
    return None


def _height(problem: GemmReduceScatter) -> int:
    return problem.shard_rows if problem.output == "scattered" else problem.m


def _tile_of(word: int, config: Config, two: bool) -> int:
    return word // (config["block_n"] // (1 + two))


def _piece(problem: GemmReduceScatter, config: Config, two: bool) -> tuple[int, int]:
    """Rows and words of a piece."""
    rows = min(16, config["block_m"], power_of_two(_height(problem)))
    words = PIECE_WORDS // rows
    if problem.output == "replicated" and config["shots"] == "two":
        words = min(words, config["block_n"] // (1 + two))
        rows = PIECE_WORDS // words
    return rows, words


def _pieces(height: int, width: int, rows: int, words: int) -> Iterator[tuple[int, int, int, int]]:
    for row, word in product(range(0, height, rows), range(0, width, words)):
        yield row, word, rows, words


def _added_pieces(problem: GemmReduceScatter, config: Config, rank: int, two: bool) -> Iterator[tuple[int, int, int, int]]:
    rows, words = _piece(problem, config, two)
    height, width = _height(problem), ceil_div(problem.n, 1 + two)
    if problem.output == "scattered" or config["shots"] == "one":
        yield from _pieces(height, width, rows, words)
        return
    per, world = config["block_n"] // (1 + two), problem.world_size
    inner = per // words
    across = ceil_div(ceil_div(problem.n, config["block_n"]) - rank, world) * inner
    for piece in range(ceil_div(height, rows) * across):
        at = piece % across
        yield piece // across * rows, (rank + at // inner * world) * per + at % inner * words, rows, words


def _cells(piece: tuple[int, int, int, int], height: int, width: int) -> Iterator[Cell]:
    row, word, rows, words = piece
    yield from product(range(row, min(row + rows, height)), range(word, min(word + words, width)))


def sent_cells(problem: GemmReduceScatter, config: Config, owner: int, two: bool, width: int) -> Iterator[Cell]:
    """The words that any rank sends to `owner`."""
    world, high = problem.world_size, config["block_m"]
    n_tiles = ceil_div(problem.n, config["block_n"])
    rows = world * problem.shard_rows if problem.output == "scattered" else problem.m
    for block, tile in product(range(_tiles_of_rank(problem, config)), range(n_tiles)):
        if problem.output == "replicated" and config["shots"] == "two" and tile % world != owner:
            continue
        per = config["block_n"] // (1 + two)
        for row in range(block * high, min((block + 1) * high, rows)):
            if problem.output == "scattered" and row // problem.shard_rows != owner:
                continue
            line = row % problem.shard_rows if problem.output == "scattered" else row
            yield from ((line, word) for word in range(tile * per, min((tile + 1) * per, width)))
