"""A GEMM whose warps have roles: one sends, one polls, one loads, one to three groups of four multiply. For Hopper, in Gluon.

A tile of C [BLOCK_M, BLOCK_N] has two sides: X, of which each group multiplies 64 rows, and Y, which all groups multiply, in one to
three parts of Y1, Y2 and Y3 rows (powers of two, 0 if there is no such part). So a tile may be 160, 192, 224 or 320 wide: one wave of such tiles
fits where 256 would leave processors idle and 128 would need two. X is a block of A, or with X_IS_B of B; then a group computes
the transpose, and turns it on its way to memory.

Blocks of K go through STAGES buffers in shared memory, each with two barriers. The loader waits until a buffer is empty, and
asks for both blocks (TMA), whose arrival completes the barrier `full`; a group waits for that, and arrives at `empty` when its
products of that buffer are done. A poll takes a microsecond, so there is a warp for that: it tells the loader through the barriers `there`, one a K group,
and runs ahead by a tile at most (`taken`).

The own shard goes out in boxes of 64 x 64, dealt out to the senders of all programs, chunk by chunk of rows and in the order of K: from memory to a buffer and
from there to every peer (TMA). No processor is kept from multiplying. A fence for the system takes 5 us beside a GEMM, so boxes are counted on the own GPU, and who
counts the last one of a K group signals it to the peers. Boxes go out at PACE GB/s: sent all at once, those that are needed first would arrive together with the others.
The first BY_WORDS columns of a shard, which are needed before a box can be there, go by words: see `by_words`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from autotax.kernels.all_gather_gemm.by_words import exchange_words
from autotax.kernels.all_gather_gemm.gemm import grouped, remote_row
from autotax.kernels.delay import now_ns
from autotax.kernels.primitives import ERROR, LIMIT, arithmetic, flag_address, note_missing, settle
from autotax.spaces import sides

box_row = arithmetic(sides.box_row)
box_strip = arithmetic(sides.box_strip)
boxes_of = arithmetic(sides.boxes_of)

X_ROWS = gl.constexpr(sides.GROUP_ROWS)
"""Of X, that each group multiplies."""
BLOCK_K = gl.constexpr(sides.BLOCK_K)
K_ALIGNMENT = gl.constexpr(sides.K_ALIGNMENT)

# They have other names from Triton 3.8 and 3.9 on.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def tile_at(
    item, rank, rows, n_tiles, WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The first row of C and the first column of the item-th tile. Those of the own shard come first.

    With ACROSS tiles lie across shards, two sources or more to a tile; one with rows of the own shard comes first.
    """
    if ACROSS:
        m_tiles = gl.cdiv(WORLD * rows, BLOCK_M)
        place = grouped(item, m_tiles, n_tiles, GROUP_M)
        row = (place // n_tiles + rank * rows // BLOCK_M) % m_tiles * BLOCK_M
    else:
        m_tiles = rows // BLOCK_M
        place = item
        row = rank * rows
        if item < m_tiles * n_tiles:
            place = grouped(item, m_tiles, n_tiles, GROUP_M)
            row = rank * rows + place // n_tiles * BLOCK_M
        else:
            place = grouped(item - m_tiles * n_tiles, (WORLD - 1) * m_tiles, n_tiles, GROUP_M)
            position = remote_row(place // n_tiles, m_tiles, WORLD, INTERLEAVED)
            row = (rank + WORLD - position // m_tiles) % WORLD * rows + position % m_tiles * BLOCK_M
    return row, place % n_tiles * BLOCK_N


@gluon.jit
def tell_all(flags, index, epoch, bases, rank, WORLD: gl.constexpr, TARGET: gl.constexpr):
    """Sets flag `index` of every other rank to the epoch. What calls of fewer rows leave out lags behind and is not waited for."""
    settle(TARGET)
    gl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for hop in gl.static_range(1, WORLD):
        gl.atomic_xchg(flag_address(flags, index, bases, rank, (rank + hop) % WORLD), epoch, sem="relaxed", scope="sys")


@gluon.jit
def send_shard(
    sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, BOXES: gl.constexpr, PACE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The sender: BOXES boxes of the own shard in its turn among those of all programs, to every peer, chunk by chunk of rows. `peers` are
    views of their inboxes by hop, `counts` [chunks, K_GROUPS] of boxes that have been written in this call. The first BY_WORDS columns go by words.
    """
    cols -= BY_WORDS
    span = gl.cdiv(cols, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT
    strips = gl.cdiv(cols, BLOCK_K)
    count = rows // X_ROWS * strips
    landing = ((epoch & 1) * WORLD + rank) * rows
    start = now_ns(TARGET)
    if PACE:
        start += gl.cast(rows, gl.int64) * (2 * BY_WORDS * (WORLD - 1)) // PACE  # which the words take
    turn = 0
    if WORLD > 1:
        for first in range(gl.program_id(0) * BOXES, count, gl.num_programs(0) * BOXES):
            for at in gl.static_range(BOXES):
                if first + at < count:
                    place = [box_row(first + at, rows, strips, CHUNK), BY_WORDS + box_strip(first + at, rows, strips, CHUNK) * BLOCK_K]
                    mbarrier.expect(arrived.index(at), X_ROWS * BLOCK_K * 2)
                    load_block(sent, place, arrived.index(at), boxes.index(at))
            if PACE:
                due = start + gl.cast(first, gl.int64) * (X_ROWS * BLOCK_K * 2 * (WORLD - 1)) // PACE
                while now_ns(TARGET) < due:
                    pass
            for at in gl.static_range(BOXES):
                if first + at < count:
                    row = landing + box_row(first + at, rows, strips, CHUNK)
                    col = BY_WORDS + box_strip(first + at, rows, strips, CHUNK) * BLOCK_K
                    mbarrier.wait(arrived.index(at), turn & 1)
                    for hop in gl.static_range(WORLD - 1):
                        store_block(peers[hop], [row, col], boxes.index(at))
            # Until all is written, not only read; then for the generic proxy, to which counts and signals belong.
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
            settle(TARGET)
            for at in gl.static_range(BOXES):
                if first + at < count:
                    group = box_strip(first + at, rows, strips, CHUNK) * BLOCK_K // span
                    chunk = box_row(first + at, rows, strips, CHUNK) // CHUNK
                    written = gl.atomic_add(counts + chunk * K_GROUPS + group, 1, sem="acq_rel", scope="gpu") + 1
                    if written == boxes_of(group, chunk, rows, cols, span, CHUNK):
                        gl.store(counts + chunk * K_GROUPS + group, 0)  # for the next call
                        tell_all(flags, (rank * chunks + chunk) * K_GROUPS + group, epoch, bases, rank, WORLD, TARGET)
            turn += 1


@gluon.jit
def load_groups(
    view, row, at, loaded, x, stage, FIRST: gl.constexpr, END: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Asks for the rows of X of some groups, of the block that begins with `row`; their arrival counts for the barrier `loaded`."""
    for group in gl.static_range(FIRST, END):
        load_block(view, [row + group * X_ROWS, at], loaded, x.index(stage * GROUPS + group))


@gluon.jit
def load_parts(views, row, at, loaded, y, stage, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr):
    """The same of the parts of Y."""
    load_block(views[0], [row, at], loaded, y[0].index(stage))
    if Y2:
        load_block(views[1], [row + Y1, at], loaded, y[1].index(stage))
    if Y3:
        load_block(views[2], [row + Y1 + Y2, at], loaded, y[2].index(stage))


@gluon.jit
def look(flags, first, count, epoch):
    """How many of up to 32 flags from the first on, of `count` in all, have reached the epoch, one behind the other; each lane looks at one."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    address = flags.to(gl.int64) + 4 * (first + gl.minimum(lanes, count - 1))
    seen = gl.inline_asm_elementwise("ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)
    return gl.minimum(gl.min(gl.where(seen - epoch < 0, lanes, 32), 0), count)


@gluon.jit
def wait_first(flags, first, count, source, epoch, control, TARGET: gl.constexpr):
    """Waits for the first of `count` flags and returns how many are there, one behind the other; see `primitives.wait`."""
    there = look(flags, first, count, epoch)
    if there == 0:
        limit = gl.load(control + LIMIT)
        polls = 0
        while (there == 0) & (polls < limit):
            there = look(flags, first, count, epoch)
            polls += 1
            if polls % 1024 == 0:
                if gl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                    polls = limit
        if there == 0:
            note_missing(control, source, first, epoch, gl.load(flags + first))
            there = 1
    # TMA reads through the asynchronous proxy; and what one lane saw is told by another.
    gl.inline_asm_elementwise("fence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    settle(TARGET)
    return there


@gluon.jit
def poll_tiles(
    poll, there, taken, share,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The poller: tile by tile, as many K groups at a time as are there of all its rows."""
    flags, count, control, epoch, chunks = poll
    items, rank, rows, cols, n_tiles = share
    cols -= BY_WORDS
    groups = gl.cdiv(cols, gl.cdiv(cols, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT)
    ROWS: gl.constexpr = X_ROWS if ACROSS else BLOCK_M
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, _ = tile_at(item, rank, rows, n_tiles, WORLD, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N)
        mbarrier.wait(taken, (tile & 1) ^ 1)
        if BY_WORDS:
            if (row // rows != rank) | ((row + BLOCK_M - 1) // rows != rank):
                wait_first(count, 0, 1, rank, epoch * gl.num_programs(0), control, TARGET)
            mbarrier.arrive(there.index(K_GROUPS))
        ready = 0
        while ready < groups:
            more = groups - ready
            for part in gl.static_range(BLOCK_M // ROWS):
                source = (row + part * ROWS) // rows
                local = row + part * ROWS - source * rows
                if source != rank:
                    for chunk in range(local // CHUNK, (local + ROWS - 1) // CHUNK + 1):
                        more = wait_first(flags, (source * chunks + chunk) * K_GROUPS + ready, more, source, epoch, control, TARGET)
            for group in range(ready, ready + more):
                mbarrier.arrive(there.index(group))
            ready += more
        tile += 1  # noqa: SIM113


@gluon.jit
def load_tiles(
    load, b, buffers, there, taken, share,
    WORLD: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr,
    X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loader: tile by tile, a K group when it is there."""
    own, inbox, epoch = load
    x, y, full, empty = buffers
    items, rank, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    span = gl.cdiv(cols - BY_WORDS, K_GROUPS * K_ALIGNMENT) * K_ALIGNMENT
    slot = (epoch & 1) * WORLD * rows
    turn = 0
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, col = tile_at(item, rank, rows, n_tiles, WORLD, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N)
        mine, end = rank * rows, (rank + 1) * rows
        # Of both halves of a tile: they may be of different shards.
        own_first = (row >= mine) & (row < end)
        own_last = (row + BLOCK_M - X_ROWS >= mine) & (row + BLOCK_M - X_ROWS < end)
        awaited = 0  # the first column that has not been waited for
        for at in range(0, cols, BLOCK_K):
            if at >= awaited:
                group = K_GROUPS if at < BY_WORDS else (at - BY_WORDS) // span
                mbarrier.wait(there.index(group), tile & 1)
                awaited = BY_WORDS if at < BY_WORDS else BY_WORDS + (group + 1) * span
                mbarrier.arrive(taken, pred=awaited >= cols)
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            if X_IS_B:
                load_groups(b[0], col, at, loaded, x, stage, 0, GROUPS, GROUPS)
                if own_first:
                    load_parts((own, own, own), row - mine, at, loaded, y, stage, Y1, Y2, Y3)
                else:
                    load_parts((inbox, inbox, inbox), slot + row, at, loaded, y, stage, Y1, Y2, Y3)
            else:
                load_parts(b, col, at, loaded, y, stage, Y1, Y2, Y3)
                together: gl.constexpr = 1 if ACROSS else GROUPS
                if own_first:
                    load_groups(own, row - mine, at, loaded, x, stage, 0, together, GROUPS)
                else:
                    load_groups(inbox, slot + row, at, loaded, x, stage, 0, together, GROUPS)
                if ACROSS:
                    if own_last:
                        load_groups(own, row - mine, at, loaded, x, stage, 1, GROUPS, GROUPS)
                    else:
                        load_groups(inbox, slot + row, at, loaded, x, stage, 1, GROUPS, GROUPS)
            turn += 1
        tile += 1  # noqa: SIM113


@gluon.jit
def store_part(out, part, staging, row, col, rows, X_IS_B: gl.constexpr, TARGET: gl.constexpr):
    """The rows of C from `row` on, the columns from `col` on = part, turned if X is B, by way of `staging`; no rows beyond the shard's."""
    tma.store_wait(0)  # of what was staged before
    HIGH: gl.constexpr = out.block_shape[1]
    WIDE: gl.constexpr = out.block_shape[2]
    blocks: gl.constexpr = staging.shape[0] * staging.shape[1] // (HIGH * WIDE)
    flat: gl.constexpr = gl.NVMMASharedLayout(out.layout.swizzle_byte_width, out.layout.element_bitwidth, 2)
    stage = reinterpret(staging, out.dtype, [blocks, HIGH, WIDE], flat).index(0)
    if X_IS_B:
        stage.permute((1, 0)).store(part.to(out.dtype))
    else:
        stage.store(part.to(out.dtype))
    fence_async_shared()
    settle(TARGET)
    source = row // rows
    store_block(out, [source, row - source * rows, col], reinterpret(staging, out.dtype, [blocks, 1, HIGH, WIDE], out.layout).index(0))


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, exchange, epoch, out, stagings, buffers, share,
    WORLD: gl.constexpr, BY_WORDS: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, ACROSS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr,
    Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 rows of X by the parts of Y. The first group exchanges words before that."""
    x, y, full, empty = buffers
    items, rank, rows, cols, n_tiles = share
    if GROUP == 0 and BY_WORDS > 0 and WORLD > 1:
        exchange_words(exchange, rank, epoch, rows, cols, WORLD, BY_WORDS, TARGET)
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y1, 16])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y2 if Y2 else Y1, 16])
    layout3: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y3 if Y3 else Y1, 16])
    staging = stagings.index(GROUP)
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, col = tile_at(item, rank, rows, n_tiles, WORLD, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N)
        one = gl.zeros([X_ROWS, Y1], gl.float32, layout1)
        two = gl.zeros([X_ROWS, Y2 if Y2 else Y1], gl.float32, layout2)
        three = gl.zeros([X_ROWS, Y3 if Y3 else Y1], gl.float32, layout3)
        for at in range(0, cols, BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            mine = x.index(stage * GROUPS + GROUP)
            # What has ended after the wait are the products of the buffer before.
            next1 = warpgroup_mma(mine, y[0].index(stage).permute((1, 0)), one, is_async=True)
            if Y3:
                next2 = warpgroup_mma(mine, y[1].index(stage).permute((1, 0)), two, is_async=True)
                next3 = warpgroup_mma(mine, y[2].index(stage).permute((1, 0)), three, is_async=True)
                one, two, three = warpgroup_mma_wait(num_outstanding=3, deps=(next1, next2, next3))
            elif Y2:
                next2 = warpgroup_mma(mine, y[1].index(stage).permute((1, 0)), two, is_async=True)
                one, two = warpgroup_mma_wait(num_outstanding=2, deps=(next1, next2))
            else:
                one = warpgroup_mma_wait(num_outstanding=1, deps=(next1,))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=at > 0)
            turn += 1
        if Y3:
            one, two, three = warpgroup_mma_wait(num_outstanding=0, deps=(one, two, three))
        elif Y2:
            one, two = warpgroup_mma_wait(num_outstanding=0, deps=(one, two))
        else:
            one = warpgroup_mma_wait(num_outstanding=0, deps=(one,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES))
        row += 0 if X_IS_B else GROUP * X_ROWS
        col += GROUP * X_ROWS if X_IS_B else 0
        store_part(out[0], one, staging, row, col, rows, X_IS_B, TARGET)
        if Y2:
            store_part(out[1], two, staging, row + (Y1 if X_IS_B else 0), col + (0 if X_IS_B else Y1), rows, X_IS_B, TARGET)
        if Y3:
            store_part(out[2], three, staging, row + (Y1 + Y2 if X_IS_B else 0), col + (0 if X_IS_B else Y1 + Y2), rows, X_IS_B, TARGET)
    tma.store_wait(0)


@gluon.jit
def gather_tiles(
    own, inbox, b, out, sent, peers, exchange, counts, bases, flags, control, rank, epoch, rows, cols, n, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, BOXES: gl.constexpr, PACE: gl.constexpr, INTERLEAVED: gl.constexpr,
    GROUP_M: gl.constexpr, ACROSS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    """A program's part of C = gather(A) @ B.T, A sharded along M: sends its boxes, computes its tiles.

    `rows` is a multiple of 64, and unless ACROSS of the rows of a tile; a shard may have less, and the last of them count as zeros. `own` [shard, cols],
    `inbox` [2 * WORLD * rows, cols], `b` [n, cols] and `out` [WORLD, shard, n] are TMA descriptors of what a tile takes, the last two one for
    each part (of X there is one); `exchange` is what `by_words.exchange_words` takes, `sent` and `peers` those of boxes of the own shard and of the peers' inboxes, by hop. Only blocks of A that are X may lie
    across. Flags are [WORLD, chunks, K_GROUPS], with as many chunks as the largest call has.
    """
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    n_tiles = gl.cdiv(n, BLOCK_N)
    items = gl.cdiv(WORLD * rows, BLOCK_M) * n_tiles if ACROSS else WORLD * (rows // BLOCK_M) * n_tiles
    dtype: gl.constexpr = own.dtype
    layout: gl.constexpr = own.layout
    x = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, X_ROWS, BLOCK_K], layout)
    y1 = gl.allocate_shared_memory(dtype, [STAGES, Y1, BLOCK_K], layout)
    y2 = y1
    y3 = y1
    if Y2:
        y2 = gl.allocate_shared_memory(dtype, [STAGES, Y2, BLOCK_K], layout)
    if Y3:
        y3 = gl.allocate_shared_memory(dtype, [STAGES, Y3, BLOCK_K], layout)
    staged: gl.constexpr = gl.NVMMASharedLayout(out[0].layout.swizzle_byte_width, out[0].layout.element_bitwidth, 2)
    stagings = gl.allocate_shared_memory(dtype, [GROUPS, Y1, X_ROWS] if X_IS_B else [GROUPS, X_ROWS, Y1], staged)
    boxes = gl.allocate_shared_memory(dtype, [BOXES, X_ROWS, BLOCK_K], sent.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [K_GROUPS + 1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(BOXES):
        mbarrier.init(arrived.index(at), count=1)
    mbarrier.init(taken, count=1)
    for group in gl.static_range(K_GROUPS + 1):
        mbarrier.init(there.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    poll = (flags, exchange[7], control, epoch, chunks)
    load = (own, inbox, epoch)
    buffers = (x, (y1, y2, y3), full, empty)
    share = (items, rank, rows, cols, n_tiles)
    # Written out: a list of functions can only be made where it is handed over. The last numbers are registers a thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (load_tiles, (load, b, buffers, there, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, there, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [1, 1, 1],
            [88, 88, 88],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (multiply_tiles, (1, exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (load_tiles, (load, b, buffers, there, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, there, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [4, 1, 1, 1],
            [232, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        # Two products side by side need more, and leave the others what costs them a spill or two.
        MOST: gl.constexpr = 160 if Y2 else 152
        REST: gl.constexpr = 32 if Y2 else 56
        gl.warp_specialize(
            [
                (multiply_tiles, (0, exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (multiply_tiles, (1, exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (multiply_tiles, (2, exchange, epoch, out, stagings, buffers, share, WORLD, BY_WORDS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET)),
                (load_tiles, (load, b, buffers, there, taken, share, WORLD, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES)),
                (poll_tiles, (poll, there, taken, share, WORLD, CHUNK, BY_WORDS, K_GROUPS, INTERLEAVED, GROUP_M, ACROSS, BLOCK_M, BLOCK_N, TARGET)),
                (send_shard, (sent, peers, boxes, arrived, counts, bases, flags, rank, epoch, rows, cols, chunks, WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, TARGET)),
            ],
            [4, 4, 1, 1, 1],
            [MOST, MOST, REST, REST, REST],
        )  # fmt: skip
