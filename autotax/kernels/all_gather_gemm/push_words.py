"""push_words: the whole shard travels as self-validating words while blocks of B are already loading. For few rows, where loading
B takes most of the time. `push_specialized` sends the first columns of its shards as such words.

Four warps of every program send their part of this rank's shard and receive their part of the other shards. They write both to
the place from which the product reads A, K group by K group, and count finished work on their GPU. Two warps load: one loads B,
as far ahead as there are buffers; the other loads a K group of A when all programs have counted it. One or two groups of four
warps multiply (`roles`). There are no flags in the heap, no system-scope fences, and no second kernel.

A box of `push_specialized` can be multiplied about 10 us after the launch: it is loaded, written, counted, fenced and signalled
in sequence. A word is only loaded, written and seen. A word has 8 bytes, four elements, and is always read and written whole.
NOTHING, four times -0.0, marks a word that has not arrived; a sender replaces such a word by zeros. The receiver copies each word
to its place in A, then restores NOTHING.

Waits: receivers wait only for peers, whose programs send their words before they wait for anything. Each program counts itself on
its GPU when it has received its part. The warp that loads A, and pollers, wait for all programs of their own rank. All programs
are resident, one per processor. `docs/memory-model.md` says why no word is read too early or lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.roles import (
    BLOCK_K,
    X_ROWS,
    Views,
    allocate,
    load_groups,
    load_parts,
    multiply_tiles,
    tile_at,
    wait_first,
)
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, LIMIT, leave, note_missing, settle
from autotax.kernels.tiling import BLOCKS_BELOW_EACH_OTHER
from autotax.operators.all_gather_gemm import AllGatherGemm

NOTHING = -0x7FFF7FFF7FFF8000
"""0x8000800080008000 as int64: four times -0.0 of either 16-bit type."""
THREADS = gl.constexpr(128)
"""Threads of the warp group that exchanges words; each thread moves 16 bytes at a time."""

_LOAD = gl.constexpr("""{
.reg .pred p, q;
setp.ne.s32 p, $3, 0;
mov.b64 $0, 0;
mov.b64 $1, 0;
@p ld.global.v2.b64 {$0, $1}, [$2];
setp.eq.b64 q, $0, 0x8000800080008000;
selp.b64 $0, 0, $0, q;
setp.eq.b64 q, $1, 0x8000800080008000;
selp.b64 $1, 0, $1, q;
}""")
_SEND = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $4, 0;
@p st.relaxed.sys.global.v2.b64 [$1], {$2, $3};
mov.u32 $0, 0;
}""")
AT_ONCE = 4
"""Units of 16 bytes that a thread polls together. Polled one after the other, each would cost a round trip to the L2."""


def _poll_of(count: int) -> str:
    """Returns PTX that loads `count` units of 16 bytes, those with a set mask bit, until all have arrived or the poll
    limit is reached. It also returns the number of a missing unit, from 1 on, or 0.
    """
    words, addresses = [f"${2 * at}, ${2 * at + 1}" for at in range(count)], [f"${2 * count + 1 + at}" for at in range(count)]
    lost, limit, mask = f"${2 * count}", f"${3 * count + 1}", f"${3 * count + 2}"
    lines = [f".reg .pred p, q, s<{count}>;", ".reg .b32 n, m;"]
    for at in range(count):
        lines += [f"and.b32 m, {mask}, {1 << at};", f"setp.ne.s32 s{at}, m, 0;", *(f"mov.b64 {word}, 0;" for word in words[at].split(", "))]
    lines += [f"mov.u32 {lost}, 0;", "mov.u32 n, 0;", "AGAIN:"]
    lines += [f"@s{at} ld.relaxed.sys.global.v2.b64 {{{words[at]}}}, [{addresses[at]}];" for at in range(count)]
    tests = [f"b64 p, {word}, 0x8000800080008000" for pair in words for word in pair.split(", ")]
    lines += [f"setp.ne.{tests[0]};", *(f"setp.ne.and.{test}, p;" for test in tests[1:]), "@p bra THERE;"]
    lines += ["add.u32 n, n, 1;", f"setp.lt.u32 q, n, {limit};", "@q bra AGAIN;"]
    for at in reversed(range(count)):
        first, second = words[at].split(", ")
        lines += [f"setp.eq.b64 p, {first}, 0x8000800080008000;", f"setp.eq.or.b64 p, {second}, 0x8000800080008000, p;", f"@p mov.u32 {lost}, {at + 1};"]
    lines += ["THERE:"]
    return "{\n" + "\n".join(lines) + "\n}"


_POLL = gl.constexpr(_poll_of(AT_ONCE))
_POLLED = gl.constexpr("=&l," * 2 * AT_ONCE + "=&r," + "l," * AT_ONCE + "r,r")
_TAKE = gl.constexpr("""{
.reg .pred p;
.reg .b64 none;
setp.ne.s32 p, $5, 0;
mov.b64 none, 0x8000800080008000;
@p st.global.v2.b64 [$1], {$3, $4};
@p st.relaxed.sys.global.v2.b64 [$2], {none, none};
mov.u32 $0, 0;
}""")


@gluon.jit
def _place_of(number, group, to, slot, rank, rows, cols, total, across: gl.constexpr, WORLD: gl.constexpr):
    """The address of the number-th unit of 16 bytes that arrives in a K group, its place in A, and whether it exists."""
    landed, words, room = to
    source = (rank + 1 + number // total) % WORLD
    place = number % total
    word = words.to(gl.int64) + (gl.cast((slot + source) * room, gl.int64) + group * total + place) * 16
    row = gl.cast(source * rows + place // across, gl.int64)
    home = landed.to(gl.int64) + (row * cols + (group * across + place % across) * 8) * 2
    return word, home, (number < (WORLD - 1) * total).to(gl.int32)


@gluon.jit
def _take(home, word, one, two, some):
    gl.inline_asm_elementwise(_TAKE, "=r,l,l,l,l,r", [home, word, one, two, some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_words(exchange, rank, epoch, rows, cols, WORLD: gl.constexpr, COLUMNS: gl.constexpr, K_GROUPS: gl.constexpr, OWN: gl.constexpr):
    """Sends a program's part of the first COLUMNS of this rank's shard [rows, cols] to every peer, K group by K
    group. Called by four warps.

    `exchange` is (a, stride, shard, landed, words, landings, room, counts, control). `a` is this rank's shard [shard,
    stride]; rows from `shard` on count as zeros. `landed` [WORLD, rows, cols] receives the peers' shards, and with
    OWN also this rank's. `words` is the inbox [2, WORLD, room, 16 bytes], and `landings` has its addresses on the
    peers by hop. `counts` [K_GROUPS] counts the programs that have received their part, over all calls.
    """
    a, stride, shard, landed, _, landings, room, _, _ = exchange
    lanes = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    across: gl.constexpr = COLUMNS // K_GROUPS // 8
    total = rows * across
    for begin in range(gl.program_id(0) * THREADS, K_GROUPS * total, gl.num_programs(0) * THREADS):
        place = begin + lanes
        row = place % total // across
        col = gl.cast((place // total * across + place % across) * 8, gl.int64)
        some = (place < K_GROUPS * total).to(gl.int32)
        own = ((row < shard) & (place < K_GROUPS * total)).to(gl.int32)
        address = a.to(gl.int64) + (gl.cast(row, gl.int64) * stride + col) * 2
        one, two = gl.inline_asm_elementwise(
            _LOAD, "=&l,=&l,l,r", [address, own], dtype=(gl.int64, gl.int64), is_pure=False, pack=1
        )
        offset = (gl.cast(((epoch & 1) * WORLD + rank) * room, gl.int64) + place) * 16
        for hop in gl.static_range(WORLD - 1):
            gl.inline_asm_elementwise(
                _SEND, "=r,l,l,l,r", [gl.load(landings + hop) + offset, one, two, some], dtype=gl.int32, is_pure=False, pack=1
            )
        if OWN:
            home = landed.to(gl.int64) + (gl.cast(rank * rows + row, gl.int64) * cols + col) * 2
            gl.inline_asm_elementwise(_SEND, "=r,l,l,l,r", [home, one, two, some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def receive_words(
    exchange, rank, epoch, rows, cols, WORLD: gl.constexpr, COLUMNS: gl.constexpr, K_GROUPS: gl.constexpr, TARGET: gl.constexpr
):  # fmt: skip
    """Receives a program's part of the peers' words and copies them to their places in A, K group by K group."""
    _, _, _, landed, words, _, room, counts, control = exchange
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, THREADS, layout=layout)
    across: gl.constexpr = COLUMNS // K_GROUPS // 8
    total = rows * across
    slot = (epoch & 1) * WORLD
    to = (landed, words, room)
    limit = gl.load(control + LIMIT)
    missing = gl.zeros([THREADS], gl.int32, layout)
    step = gl.num_programs(0) * THREADS
    for group in range(K_GROUPS):
        # Each K group starts at another program, so that few words spread evenly over the programs.
        first = (gl.program_id(0) + group * gl.num_programs(0) // K_GROUPS) % gl.num_programs(0) * THREADS + lanes
        for begin in range(0, (WORLD - 1) * total, 4 * step):
            word0, home0, some0 = _place_of(first + begin, group, to, slot, rank, rows, cols, total, across, WORLD)
            word1, home1, some1 = _place_of(first + begin + step, group, to, slot, rank, rows, cols, total, across, WORLD)
            word2, home2, some2 = _place_of(first + begin + 2 * step, group, to, slot, rank, rows, cols, total, across, WORLD)
            word3, home3, some3 = _place_of(first + begin + 3 * step, group, to, slot, rank, rows, cols, total, across, WORLD)
            a0, b0, a1, b1, a2, b2, a3, b3, lost = gl.inline_asm_elementwise(
                _POLL, _POLLED, [word0, word1, word2, word3, gl.where(missing > 0, 1, limit), some0 + 2 * some1 + 4 * some2 + 8 * some3],
                dtype=(gl.int64, gl.int64, gl.int64, gl.int64, gl.int64, gl.int64, gl.int64, gl.int64, gl.int32), is_pure=False, pack=1,
            )  # fmt: skip
            source = (rank + 1 + (first + begin + (lost - 1) * step) // total) % WORLD
            missing = gl.where((lost > 0) & (missing == 0), 1 + source, missing)
            _take(home0, word0, a0, b0, some0)
            _take(home1, word1, a1, b1, some1)
            _take(home2, word2, a2, b2, some2)
            _take(home3, word3, a3, b3, some3)
        lost = gl.max(missing, 0)
        if lost > 0:
            note_missing(control, lost - 1, group, epoch, 0, TARGET)
        settle(TARGET)
        gl.atomic_add(counts + group, 1, sem="acq_rel", scope="gpu")


GROUP_M = gl.constexpr(BLOCKS_BELOW_EACH_OTHER)
MOST_REGISTERS = {1: 168, 2: 128}
"""Registers per thread at the launch, by the number of multiplying groups."""


@gluon.jit
def exchange_words(exchange, rank, epoch, rows, WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, TARGET: gl.constexpr):
    send_words(exchange, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, True)
    receive_words(exchange, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, TARGET)


@gluon.jit
def load_b(
    b, buffers, share,
    X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Loads each block of B as soon as a buffer is empty."""
    x, y, full, empty = buffers
    items, rank, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, col = tile_at(item, rank, rows, n_tiles, 1, False, GROUP_M, True, BLOCK_M, BLOCK_N)
        for at in range(0, cols, DEPTH * BLOCK_K):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, BLOCK_N * DEPTH * BLOCK_K * 2)
            for strip in gl.static_range(DEPTH):
                if X_IS_B:
                    load_groups(b[0], col, at + strip * BLOCK_K, loaded, x, stage * DEPTH + strip, 0, GROUPS, GROUPS)
                else:
                    load_parts(b, col, at + strip * BLOCK_K, loaded, y, stage * DEPTH + strip, Y1, Y2, Y3)
            turn += 1


@gluon.jit
def load_a(
    landed, counts, goal, control, source, buffers, share,
    K_GROUPS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr,
    STAGES: gl.constexpr, DEPTH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Loads blocks of A, each when all programs of this rank have stored its K group."""
    x, y, full, empty = buffers
    items, rank, rows, cols, n_tiles = share
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    turn = 0
    ready = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, _ = tile_at(item, rank, rows, n_tiles, 1, False, GROUP_M, True, BLOCK_M, BLOCK_N)
        for at in range(0, cols, DEPTH * BLOCK_K):
            while (ready < K_GROUPS) & (at >= ready * (cols // K_GROUPS)):
                ready += wait_first(counts, ready, K_GROUPS - ready, source, goal, control, 2, TARGET)
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, BLOCK_M * DEPTH * BLOCK_K * 2)
            for strip in gl.static_range(DEPTH):
                if X_IS_B:
                    load_parts((landed, landed, landed), row, at + strip * BLOCK_K, loaded, y, stage * DEPTH + strip, Y1, Y2, Y3)
                else:
                    load_groups(landed, row, at + strip * BLOCK_K, loaded, x, stage * DEPTH + strip, 0, GROUPS, GROUPS)
            turn += 1


@gluon.jit(do_not_specialize=["rank", "shard"])
def push_words_kernel(
    landed, b1, b2, b3, out1, out2, out3, a, stride, shard, landing, words, landings, room, counts, control, rank, rows, n,
    WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr,
    Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """`landed` [WORLD * rows, COLS], `b` [n, COLS] and `out` [1, WORLD * rows, n] are TMA descriptors of the blocks
    of a tile. `b` and `out` have one descriptor per part.
    """
    epoch = gl.load(control + EPOCH)
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    b = (b1, b2, b3)
    out = (out1, out2, out3)
    n_tiles = gl.cdiv(n, BLOCK_N)
    buffers, stagings = allocate(landed, out1, 2, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)
    fence_async_shared()
    exchange = (a, stride, shard, landing, words, landings, room, counts, control)
    # The gathered A is treated as one shard, because all its rows lie in one place.
    share = (gl.cdiv(WORLD * rows, BLOCK_M) * n_tiles, 0, WORLD * rows, COLS, n_tiles)
    goal = epoch * gl.num_programs(0)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (exchange_words, (exchange, rank, epoch, rows, WORLD, COLS, K_GROUPS, TARGET)),
                (multiply_tiles, (0, out, stagings, buffers, share, 1, False, GROUP_M, True, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 1, 1],
            [168, 96, 96],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (exchange_words, (exchange, rank, epoch, rows, WORLD, COLS, K_GROUPS, TARGET)),
                (multiply_tiles, (0, out, stagings, buffers, share, 1, False, GROUP_M, True, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (multiply_tiles, (1, out, stagings, buffers, share, 1, False, GROUP_M, True, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 4, 1, 1],
            [160, 160, 64, 64],
        )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushWords(Kernel[AllGatherGemm]):
    rows: int
    landing: Tensor
    view_of_a: TensorDescriptor

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.views = Views(config, problem.dtype)
        self.room = rows * cols // 8
        self.words = context.heap.alloc((2 * world * self.room, 2), torch.int64).fill_(NOTHING)
        places = [context.heap.peer(self.words, (context.rank + hop) % world).data_ptr() for hop in range(1, world)]
        self.landings = torch.tensor(places or [0], dtype=torch.int64, device=self.words.device)
        self.counts = context.empty((config["k_groups"],), torch.int32).zero_()
        vars(self).update(self.landed(context.empty((world * rows, cols), context.dtype(problem))))
        self.constants = {
            "WORLD": world, "COLS": cols, "K_GROUPS": config["k_groups"], **self.views.constants,
            "DEPTH": config["block_k"] // BLOCK_K.value, "maxnreg": MOST_REGISTERS[self.views.groups],
        }  # fmt: skip

    def landed(self, landing: Tensor) -> dict[str, Any]:
        """The attributes that depend on the rows: the buffer of all shards, [world size * rows, cols], and its view."""
        return {"landing": landing, "rows": len(landing) // self.problem.world_size, "view_of_a": self.views.of_a(landing)}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        context = self.context
        context.launch(
            push_words_kernel, (context.processors,),
            self.view_of_a, *self.views.of_b(b), *self.views.of_out(out[None]),
            a, a.stride(0), len(a), self.landing, self.words, self.landings, self.room, self.counts, self.control, context.rank,
            self.rows, self.problem.n,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: each call takes the words that it sends and restores their markers."""
        return self.landed(self.landing[: smaller.world_size * smaller.shard_rows])
