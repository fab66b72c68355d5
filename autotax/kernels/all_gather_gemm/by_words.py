"""Exchanges the first columns of the shards as self-validating words, without fences or signals.

A box of `push_specialized` can be multiplied about 10 us after the launch: it is loaded, written, counted, fenced and
signalled in sequence. A word is only loaded, written and seen. A word has 8 bytes, four elements, and is always read
and written whole. NOTHING, four times -0.0, marks a word that has not arrived; a sender replaces such a word by
zeros. The receiver copies each word to its place in A, then restores NOTHING.

No word is read too early or lost, because inboxes have two slots. A rank sends words of call e + 2 after its call e +
1 has ended. In call e + 1 it has received words of every peer. A peer sent them after its own call e had ended. Then
the peer had taken all words of call e and restored NOTHING. So words need no order among themselves. A call of fewer
rows does not touch the words that it does not send.

Each program counts itself on its GPU when it has received its part. Pollers wait for all programs of the GPU.
Receivers wait only for peers, whose programs send their words before they wait for anything.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from autotax.kernels.primitives import LIMIT, note_missing, settle

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
    tests = [f"b64 p, {word}, 0x8000800080008000" for each in words for word in each.split(", ")]
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
    """For the number-th unit of 16 bytes that arrives in a K group: its address, its place in A, and whether there is
    such a unit.
    """
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
        there = (gl.cast(((epoch & 1) * WORLD + rank) * room, gl.int64) + place) * 16
        for hop in gl.static_range(WORLD - 1):
            gl.inline_asm_elementwise(
                _SEND, "=r,l,l,l,r", [gl.load(landings + hop) + there, one, two, some], dtype=gl.int32, is_pure=False, pack=1
            )
        if OWN:
            home = landed.to(gl.int64) + (gl.cast(rank * rows + row, gl.int64) * cols + col) * 2
            gl.inline_asm_elementwise(_SEND, "=r,l,l,l,r", [home, one, two, some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def receive_words(
    exchange, rank, epoch, rows, cols, WORLD: gl.constexpr, COLUMNS: gl.constexpr, K_GROUPS: gl.constexpr, TARGET: gl.constexpr
):  # fmt: skip
    """Receives a program's part of the peers' words and copies them to their places in A, K group by K group; see
    `send_words`.
    """
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
