"""The parts of `push_specialized`, `push_one_shot` and their scaled twins: what each warp of a program does. For Hopper, in Gluon.

A tile of the partial sum is [GROUPS * 64, PARTS * WIDE]. Tiles of other owners come first, as in `product`. Each of one or two
groups multiplies 64 rows by all columns, part by part. It rounds each part and stages it in shared memory. The sender stores
staged parts in the owner's inbox (TMA), or in those of all ranks. When all of a tile is written there, it sets the flag to the
number of the call.

Without EPILOGUE pieces of this rank's rows are distributed over the four adding warps of all programs, in the order in which tiles
arrive. A poll takes a microsecond, and six while the links are full. So a separate warp polls. It waits for the flags of all ranks
and signals the adders through the barrier `landed`. It runs at most one piece ahead (`taken`). With AHEAD one poll reads the flags
of many pieces, and pieces are larger. With EPILOGUE the groups add to their own tiles what the poller has loaded into the staging
area. See docs/memory-model.md for why every wait ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from autotax.kernels.all_gather_gemm.roles import (
    BLOCK_K,
    X_ROWS,
    allocate,
    load_block,
    load_groups,
    load_parts,
    products_of,
    reinterpret,
    store_block,
    wait_first,
)
from autotax.kernels.gemm_reduce_scatter.product import grouped, remote_row
from autotax.kernels.primitives import flag_address, settle
from autotax.kernels.scaled_roles import CODES, multiply_tile, with_scales

PIECE_ROWS = gl.constexpr(16)
"""Rows of a tile that are added up at a time, where each is polled for."""
PIECE_OF_TWO, PIECE_OF_MORE = gl.constexpr(8192), gl.constexpr(4096)
"""Elements of a piece with AHEAD, of two or more ranks: adding warps have the registers to load so many of two or four at once."""


@gluon.jit
def tile_at(item, m_tiles, n_tiles, WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr):
    """Returns (hop, row of tiles, tile of the row) of the item-th tile, which rank + hop owns. This rank's tiles come last."""
    remote = (WORLD - 1) * m_tiles * n_tiles
    if item < remote:
        place = grouped(item, (WORLD - 1) * m_tiles, n_tiles, GROUP_M)
        position = remote_row(place // n_tiles, m_tiles, WORLD, INTERLEAVED)
    else:
        place = grouped(item - remote, m_tiles, n_tiles, GROUP_M)
        position = place // n_tiles
    return position // m_tiles, position % m_tiles, place % n_tiles


@gluon.jit
def load_tiles(
    a, b, buffers, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loader: loads blocks of A and B. It waits only for empty buffers."""
    x, y, full, empty = buffers
    items, rank, rows, cols, m_tiles, n_tiles = share
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        row = (rank + hop) % WORLD * rows + block * (GROUPS * X_ROWS)
        for at in range(0, cols, BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, (GROUPS * X_ROWS + PARTS * WIDE) * BLOCK_K * 2)
            load_parts((b, b, b), tile * (PARTS * WIDE), at, loaded, y, stage, WIDE, WIDE * (PARTS - 1), 0)
            load_groups(a, row, at, loaded, x, stage, 0, GROUPS, GROUPS)
            turn += 1


@gluon.jit
def stage_part(part, staging, staged, drained, turn, TARGET: gl.constexpr):
    """Stages a part for the sender, once the sender has taken the previous part."""
    mbarrier.wait(drained, (turn & 1) ^ 1)
    staging.store(part.to(staging.dtype))
    fence_async_shared()
    settle(TARGET)
    mbarrier.arrive(staged)


@gluon.jit
def with_addends(total, bias, residual, added, r, c, at, inside, n, m, rank, rows):
    """total + bias[c] + residual[r, c] in rows that are not padding; see `reduction.with_addends`. Its elements are `at`."""
    if added is not None:
        below = (r < m - rank * rows)[:, None]
        shared = gl.load(bias + c, mask=(c < n) & (added % 2 == 1), other=0.0).to(gl.float32)
        total += gl.where(below, shared[None, :], 0.0)
        total += gl.load(residual + at, mask=inside & below & (added >= 2), other=0.0).to(gl.float32)
    return total


@gluon.jit
def with_peers(own, sums, staging, reads, row, col, rank, rows, WORLD: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr):
    """The sum of this rank's part and of those that its peers have sent, of the next rank first, with the addends.

    `poll_peers` loads the parts one after the other into the staging area. Returns the sum and the new number of `reads`.
    """
    bias, residual, added, n, m, landed, taken = sums
    layout: gl.constexpr = own.type.layout
    for hop in gl.static_range(1, WORLD):
        mbarrier.wait(landed, reads & 1)
        own += staging.load(layout).to(gl.float32)
        reads += 1
        if hop < WORLD - 1:
            settle(TARGET)  # all warps have read it
            mbarrier.arrive(taken)
    if added is not None:
        n = n // 8 * 8  # shows the compiler the alignment
        r = row + gl.arange(0, X_ROWS, layout=gl.SliceLayout(1, layout))
        c = col + gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
        inside = (r < rows)[:, None] & (c < n)[None, :]
        at = r.to(gl.int64)[:, None] * n + c[None, :]
        own = with_addends(own, bias, residual, added, r, c, at, inside, n, m, rank, rows)
    return own, reads


@gluon.jit
def with_row_scales(total, of_a, inside, scales_b, col, n, SCALES: gl.constexpr):
    """A part with its scales. Rows of padding lie in the next owner's rows, or are zeros that a NaN of B makes NaN."""
    if SCALES != "none":
        total = gl.where(inside[:, None], with_scales(total, of_a, inside, scales_b, col, n, SCALES, False), 0.0)
    return total


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, of_all, sums, n, m, stagings, staged, drained, buffers, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, EPILOGUE: gl.constexpr, GROUPS: gl.constexpr,
    PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """One group of warps: multiplies its 64 rows of each tile of this program. Other warps load the operands and send the tile.

    With EPILOGUE it adds to a tile of this rank's rows what the peers have sent. `of_all` are the scales of A with their strides,
    and those of B; nothing is read of them where SCALES is "none".
    """
    items, rank, rows, cols, m_tiles, n_tiles = share
    groups = gl.cdiv(2 * cols, CODES)
    turn = 0
    sent = 0
    reads = 0
    staging = stagings.index(GROUP)
    if EPILOGUE:
        bias, residual, added, of_n, of_m, landed, taken = sums
        sums = bias, residual, added, of_n, of_m, landed.index(GROUP), taken.index(GROUP)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        first = (block * GROUPS + GROUP) * X_ROWS
        col = tile * (PARTS * WIDE)
        if SCALES == "none":
            of_a, inside, scales_b = 0, 0, 0
            one, two, _, turn = products_of(GROUP, buffers, cols, turn, GROUPS, WIDE, WIDE if PARTS == 2 else 0, 0, STAGES, 1)
        else:
            layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
            scales_a, stride_m, stride_g, scales_b = of_all
            within = first + gl.arange(0, X_ROWS, layout=gl.SliceLayout(1, layout))
            row = (rank + hop) % WORLD * rows + within
            inside = (within < rows) & (row < m)
            of_a = scales_a + gl.where(inside, row, 0) * stride_m
            of_b = scales_b + col // CODES * groups
            if STRIPS == 0:
                one, two, _, turn = products_of(GROUP, buffers, cols, turn, GROUPS, WIDE, WIDE * (PARTS - 1), 0, STAGES, 1, True)
            else:
                one, two, _, turn = multiply_tile(
                    GROUP, buffers, cols, turn, of_a, stride_g, of_b,
                    SCALES, False, GROUPS, WIDE, WIDE * (PARTS - 1), 0, STAGES, 1, STRIPS,
                )  # fmt: skip
        one = with_row_scales(one, of_a, inside, scales_b, col, n, SCALES)
        if EPILOGUE:
            if hop == 0:
                one, reads = with_peers(one, sums, staging, reads, first, col, rank, rows, WORLD, WIDE, TARGET)
        stage_part(one, staging, staged.index(GROUP), drained.index(GROUP), sent, TARGET)
        if PARTS == 2:
            two = with_row_scales(two, of_a, inside, scales_b, col + WIDE, n, SCALES)
            if EPILOGUE:
                if hop == 0:
                    two, reads = with_peers(two, sums, staging, reads, first, col + WIDE, rank, rows, WORLD, WIDE, TARGET)
            stage_part(two, staging, staged.index(GROUP), drained.index(GROUP), sent + 1, TARGET)
        sent += PARTS


@gluon.jit
def send_tiles(
    boxes, out, stagings, staged, drained, taken, flags, bases, rank, epoch, share,
    WORLD: gl.constexpr, EVERYWHERE: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, EPILOGUE: gl.constexpr,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The sender. `boxes` are views [2 * WORLD, rows, n] of the inboxes by hop; flags are [row of tiles, tile, source].

    With EVERYWHERE a tile goes to all ranks. With EPILOGUE this rank's tiles are whole sums. They go to `out`, a view of C
    [1, rows, n], and no flag is set for them. The sender tells the poller when the staging area is free for what the peers have sent
    of such a tile.
    """
    items, _, _, _, m_tiles, n_tiles = share
    layout: gl.constexpr = boxes[0].layout
    dtype: gl.constexpr = boxes[0].dtype
    remote = (WORLD - 1) * m_tiles * n_tiles
    sent = 0
    if EPILOGUE:
        for area in gl.static_range(GROUPS):
            mbarrier.arrive(taken.index(area), pred=(gl.program_id(0) >= remote) & (gl.program_id(0) < items))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item, m_tiles, n_tiles, 1 if EVERYWHERE else WORLD, INTERLEAVED, GROUP_M)
        for step in range(PARTS * GROUPS):
            part = step // GROUPS
            group = step % GROUPS
            mbarrier.wait(staged.index(group), (sent + part) & 1)
            row = (block * GROUPS + group) * X_ROWS
            col = (tile * PARTS + part) * WIDE
            stage = reinterpret(stagings.index(group), dtype, [1, 1, X_ROWS, WIDE], layout).index(0)
            for to in gl.static_range(WORLD):
                if EVERYWHERE:
                    store_block(boxes[to], [(epoch & 1) * WORLD + rank, row, col], stage)
                elif hop == to:
                    if EPILOGUE and to == 0:
                        store_block(out, [0, row, col], stage)
                    else:
                        store_block(boxes[to], [(epoch & 1) * WORLD + rank, row, col], stage)
            tma.store_wait(0)  # until the staged part has been read
            mbarrier.arrive(drained.index(group))
            if EPILOGUE:
                following = gl.where(part < PARTS - 1, item, item + gl.num_programs(0))
                mbarrier.arrive(taken.index(group), pred=(following >= remote) & (following < items))
        sent += PARTS
        # Waits until the tile is written, not only read. The proxy fence then orders it before the flag.
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        settle(TARGET)
        gl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        index = (block * n_tiles + tile) * WORLD + rank
        if EVERYWHERE:
            for to in gl.static_range(WORLD):
                gl.atomic_xchg(flag_address(flags, index, bases, rank, (rank + to) % WORLD), epoch, sem="relaxed", scope="sys")
        elif not EPILOGUE or hop > 0:
            gl.atomic_xchg(flag_address(flags, index, bases, rank, (rank + hop) % WORLD), epoch, sem="relaxed", scope="sys")


@gluon.jit
def piece_at(piece, m_tiles, n_tiles, GROUP_M: gl.constexpr, HIGH: gl.constexpr, TALL: gl.constexpr):
    """Returns (row of tiles, tile of the row, first row in the tile) of the piece-th piece, of TALL rows, of this rank's rows."""
    down: gl.constexpr = HIGH // TALL
    place = grouped(piece // down, m_tiles, n_tiles, GROUP_M)
    return place // n_tiles, place % n_tiles, piece % down * TALL


@gluon.jit
def raised(flags, index, epoch):
    """Returns whether each flag has reached the epoch. A lane of a warp reads one flag."""
    address = flags.to(gl.int64) + 4 * index
    seen = gl.inline_asm_elementwise("ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)
    return (seen == epoch) | (seen == epoch + 1)  # see `roles.look`


@gluon.jit
def look_ahead(
    flags, piece, pieces, epoch, m_tiles, n_tiles,
    WORLD: gl.constexpr, GROUP_M: gl.constexpr, DOWN: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Returns how many pieces of this program, from this one on, have arrived from all ranks without a gap: 32 // WORLD at most."""
    MOST: gl.constexpr = 32 // WORLD
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    tile = gl.minimum(piece + lane // WORLD * gl.num_programs(0), pieces - 1) // DOWN
    first = tile // (GROUP_M * n_tiles) * GROUP_M  # as in `tiling.grouped`
    height = gl.minimum(m_tiles - first, GROUP_M)
    within = tile - first * n_tiles
    index = ((first + within % height) * n_tiles + within // height) * WORLD + lane % WORLD
    arrived = gl.min(gl.where(raised(flags, index, epoch), MOST, lane // WORLD), 0)
    settle(TARGET)  # the lane that signals the adders is not the one that has read the flag
    return gl.minimum(arrived, MOST)


@gluon.jit
def wait_tile(flags, first, epoch, control, WORLD: gl.constexpr, TARGET: gl.constexpr):
    """Waits until a tile has arrived from all ranks."""
    ready = 0
    while ready < WORLD:
        ready += wait_first(flags, first + ready, WORLD - ready, ready, epoch, control, 1, TARGET)


@gluon.jit
def poll_tiles(
    flags, epoch, control, landed, taken, share,
    WORLD: gl.constexpr, GROUP_M: gl.constexpr, HIGH: gl.constexpr, TALL: gl.constexpr, AHEAD: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The poller: for each piece, waits until the tiles of all ranks have arrived."""
    _, _, _, _, m_tiles, n_tiles = share
    pieces = m_tiles * n_tiles * (HIGH // TALL)
    turn = 0
    more = 0  # pieces behind this one that are known to have arrived
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        block, tile, _ = piece_at(piece, m_tiles, n_tiles, GROUP_M, HIGH, TALL)
        first = (block * n_tiles + tile) * WORLD
        if AHEAD:
            more -= 1
            if more < 0:
                more = look_ahead(flags, piece, pieces, epoch, m_tiles, n_tiles, WORLD, GROUP_M, HIGH // TALL, TARGET) - 1
                if more < 0:
                    wait_tile(flags, first, epoch, control, WORLD, TARGET)
                    more = 0
        else:
            wait_tile(flags, first, epoch, control, WORLD, TARGET)
        mbarrier.wait(taken, (turn & 1) ^ 1)
        mbarrier.arrive(landed)
        turn += 1  # noqa: SIM113


@gluon.jit
def poll_peers(
    inbox, stagings, flags, epoch, control, landed, taken, share,
    WORLD: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The poller with EPILOGUE: for each of this rank's tiles that the program computes, waits for those of all peers.

    It loads their parts into the staging areas, the first while the tile is multiplied. `inbox` is a view [2 * WORLD, rows, n].
    """
    items, rank, _, _, m_tiles, n_tiles = share
    layout: gl.constexpr = inbox.layout
    loads = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item, m_tiles, n_tiles, WORLD, INTERLEAVED, GROUP_M)
        if hop == 0:
            for distance in gl.static_range(1, WORLD):
                peer = (rank + distance) % WORLD
                wait_first(flags, (block * n_tiles + tile) * WORLD + peer, 1, peer, epoch, control, 1, TARGET)
            for part in gl.static_range(PARTS):
                for distance in gl.static_range(1, WORLD):
                    slot = (epoch & 1) * WORLD + (rank + distance) % WORLD
                    for group in gl.static_range(GROUPS):
                        mbarrier.wait(taken.index(group), loads & 1)
                        stage = reinterpret(stagings.index(group), inbox.dtype, [1, 1, X_ROWS, WIDE], layout).index(0)
                        mbarrier.expect(landed.index(group), X_ROWS * WIDE * 2)
                        row = (block * GROUPS + group) * X_ROWS
                        load_block(inbox, [slot, row, (tile * PARTS + part) * WIDE], landed.index(group), stage)
                    loads += 1


@gluon.jit
def add_tiles(
    out, bias, residual, added, box, room, n, m, epoch, landed, taken, share,
    WORLD: gl.constexpr, GROUP_M: gl.constexpr, HIGH: gl.constexpr, TALL: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """The adders: add in float32 and in the order of the ranks. `box` is [2, WORLD, room, n], n a multiple of 8."""
    _, rank, rows, _, m_tiles, n_tiles = share
    n = n // 8 * 8  # shows the compiler the alignment
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    turn = 0
    for piece in range(gl.program_id(0), m_tiles * n_tiles * (HIGH // TALL), gl.num_programs(0)):
        block, tile, within = piece_at(piece, m_tiles, n_tiles, GROUP_M, HIGH, TALL)
        r = block * HIGH + within + gl.arange(0, TALL, layout=gl.SliceLayout(1, layout))
        c = tile * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
        inside = (r < rows)[:, None] & (c < n)[None, :]
        at = r.to(gl.int64)[:, None] * n + c[None, :]
        mbarrier.wait(landed, turn & 1)
        settle(TARGET)  # else the poller could end the next phase before all four warps have seen this one
        mbarrier.arrive(taken)
        total = gl.zeros([TALL, WIDE], gl.float32, layout)
        for source in gl.static_range(WORLD):
            first = gl.cast((epoch & 1) * WORLD + source, gl.int64) * room * n
            # Bypasses the L1, because nothing invalidates it for these warps.
            total += gl.load(box + first + at, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
        total = with_addends(total, bias, residual, added, r, c, at, inside, n, m, rank, rows)
        gl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
        turn += 1  # noqa: SIM113


@gluon.jit
def scatter_tiles(
    a, b, boxes, of_all, out, bias, residual, added, box, flags, bases, control, rank, epoch, rows, cols, room, n, m,
    WORLD: gl.constexpr, EVERYWHERE: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, SCALES: gl.constexpr, EPILOGUE: gl.constexpr,
    AHEAD: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    """A program's part of a call. `a` [m, cols] and `b` [n, cols] are TMA descriptors of the blocks of a group and of a part.

    With scales they are those of words of two codes, and `of_all` are the scales as in `multiply_tiles`. `out` is C, or with
    EPILOGUE its view. With EVERYWHERE every rank gets and adds up all m rows. To the other warps there is one owner then.
    """
    OWNERS: gl.constexpr = 1 if EVERYWHERE else WORLD
    HIGH: gl.constexpr = GROUPS * X_ROWS
    TALL: gl.constexpr = (PIECE_OF_TWO if WORLD <= 2 else PIECE_OF_MORE) // (PARTS * WIDE) if AHEAD else PIECE_ROWS
    m_tiles = gl.cdiv(rows, HIGH)
    n_tiles = gl.cdiv(n, PARTS * WIDE)
    buffers, stagings = allocate(a, boxes[0], 1, GROUPS, WIDE, WIDE * (PARTS - 1), 0, STAGES, 1)
    staged = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(staged.index(group), count=1)
        mbarrier.init(drained.index(group), count=1)
    if EPILOGUE:
        landed = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(GROUPS):
            mbarrier.init(landed.index(group), count=1)
            mbarrier.init(taken.index(group), count=1)
    else:
        landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(landed, count=1)
        mbarrier.init(taken, count=1)
    fence_async_shared()
    share = (OWNERS * m_tiles * n_tiles, 0 if EVERYWHERE else rank, rows, cols, m_tiles, n_tiles)
    sums = (bias, residual, added, n, m, landed, taken)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    gl.static_assert(GROUPS <= 2)
    if EPILOGUE and GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, of_all, sums, n, m, stagings, staged, drained, buffers, share, OWNERS, INTERLEAVED, GROUP_M, SCALES, EPILOGUE, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (load_tiles, (a, b, buffers, share, OWNERS, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_tiles, (boxes, out, stagings, staged, drained, taken, flags, bases, rank, epoch, share, WORLD, EVERYWHERE, INTERLEAVED, GROUP_M, EPILOGUE, GROUPS, PARTS, WIDE, TARGET)),
                (poll_peers, (boxes[0], stagings, flags, epoch, control, landed, taken, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
            ],
            [1, 1, 1],
            [88, 88, 88],
        )  # fmt: skip
    elif EPILOGUE:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, of_all, sums, n, m, stagings, staged, drained, buffers, share, OWNERS, INTERLEAVED, GROUP_M, SCALES, EPILOGUE, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (multiply_tiles, (1, of_all, sums, n, m, stagings, staged, drained, buffers, share, OWNERS, INTERLEAVED, GROUP_M, SCALES, EPILOGUE, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (load_tiles, (a, b, buffers, share, OWNERS, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_tiles, (boxes, out, stagings, staged, drained, taken, flags, bases, rank, epoch, share, WORLD, EVERYWHERE, INTERLEAVED, GROUP_M, EPILOGUE, GROUPS, PARTS, WIDE, TARGET)),
                (poll_peers, (boxes[0], stagings, flags, epoch, control, landed, taken, share, WORLD, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, TARGET)),
            ],
            [4, 1, 1, 1],
            [224, 56, 56, 56],
        )  # fmt: skip
    elif GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, of_all, sums, n, m, stagings, staged, drained, buffers, share, OWNERS, INTERLEAVED, GROUP_M, SCALES, EPILOGUE, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (add_tiles, (out, bias, residual, added, box, room, n, m, epoch, landed, taken, share, WORLD, GROUP_M, HIGH, TALL, PARTS * WIDE, TARGET)),
                (load_tiles, (a, b, buffers, share, OWNERS, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_tiles, (boxes, out, stagings, staged, drained, taken, flags, bases, rank, epoch, share, WORLD, EVERYWHERE, INTERLEAVED, GROUP_M, EPILOGUE, GROUPS, PARTS, WIDE, TARGET)),
                (poll_tiles, (flags, epoch, control, landed, taken, share, WORLD, GROUP_M, HIGH, TALL, AHEAD, TARGET)),
            ],
            [4, 1, 1, 1],
            [184, 88, 88, 88],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (0, of_all, sums, n, m, stagings, staged, drained, buffers, share, OWNERS, INTERLEAVED, GROUP_M, SCALES, EPILOGUE, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (multiply_tiles, (1, of_all, sums, n, m, stagings, staged, drained, buffers, share, OWNERS, INTERLEAVED, GROUP_M, SCALES, EPILOGUE, GROUPS, PARTS, WIDE, STAGES, STRIPS, TARGET)),
                (add_tiles, (out, bias, residual, added, box, room, n, m, epoch, landed, taken, share, WORLD, GROUP_M, HIGH, TALL, PARTS * WIDE, TARGET)),
                (load_tiles, (a, b, buffers, share, OWNERS, INTERLEAVED, GROUP_M, GROUPS, PARTS, WIDE, STAGES)),
                (send_tiles, (boxes, out, stagings, staged, drained, taken, flags, bases, rank, epoch, share, WORLD, EVERYWHERE, INTERLEAVED, GROUP_M, EPILOGUE, GROUPS, PARTS, WIDE, TARGET)),
                (poll_tiles, (flags, epoch, control, landed, taken, share, WORLD, GROUP_M, HIGH, TALL, AHEAD, TARGET)),
            ],
            [4, 4, 1, 1, 1],
            [176, 104, 56, 56, 56],
        )  # fmt: skip
