"""The first columns of the shards, exchanged by words that tell by themselves whether they have come: no fence, no signal.

A box of `specialized` can be multiplied some 10 us after the launch: it is loaded, written, counted, fenced and signalled, one
after the other. A word is loaded, written and seen: 8 bytes, four elements, each written and read as a whole. NOTHING, four times
-0.0, marks a word that has not come; a sender replaces such a word by zeros. The receiver copies each word to its place in A,
then restores NOTHING.

Why no word is seen too early or lost: inboxes have two slots. A rank sends words of call e + 2 after its call e + 1 has ended. For
that call it has heard of every peer. A peer speaks after its own call e has ended, with all words taken and NOTHING in their
places. So words also need no order among themselves, and a call of fewer rows leaves those that it does not send as they were.

Programs count on their own GPU when they have received their part, and pollers wait for all of them. Each waits for
nobody but the peers, whose programs send their words before they wait for anything.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from autotax.kernels.primitives import LIMIT, note_missing, settle

NOTHING = -0x7FFF7FFF7FFF8000
"""0x8000800080008000 as int64: four times -0.0 of either 16-bit type."""
THREADS = gl.constexpr(128)
"""Of the one group of warps that exchanges words, each thread 16 bytes at a time."""

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
"""Of such 16 bytes that a thread polls: one after the other, each would take a trip to the L2."""


def _poll_of(count: int) -> str:
    """Loads `count` times 16 bytes, those of the bits of a mask, until all have come or the limit is reached; then tells which
    one is missing, from 1 on.
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
    """Of the number-th 16 bytes of a K group that arrive: their address, where they belong, and whether there are such."""
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
    """A program's part of the first COLUMNS of the own [rows, cols], to every peer, K group by K group. Called by four warps.

    `exchange` is (a, stride, shard, landed, words, landings, room, counts, control). `a` is the own shard [shard, stride]; its rows
    from `shard` on are zeros. `landed` [WORLD, rows, cols] holds the shards, with OWN the own one too. `words` is the inbox
    [2, WORLD, room, 16 bytes], and `landings` has its addresses on the peers by hop. `counts` [K_GROUPS] counts the programs that
    have received their part, in all calls.
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
    """A program's part of what the peers send, to where it belongs, K group by K group; see `send_words`."""
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
        # Others begin with each K group, so that few words are shared out evenly.
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
