"""Head gather: the collective library, our own push with flags, and words that validate themselves."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.context import Context, all_resident, gdc_wait
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.kernel import VECTOR_BYTES, Kernel
from autotax.kernels.primitives import (
    EPOCH,
    ERROR,
    LIMIT,
    copy,
    flag_address,
    leave,
    load_whole,
    note_missing,
    signal,
    store_whole,
    translate,
    wait,
)
from autotax.operators.head_gather import HeadGather


class Bsp(Kernel[HeadGather]):
    """The collective library's all-gather, then a copy that puts the heads of each token side by side."""

    def __init__(self, problem: HeadGather, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shape = problem.world_size, problem.batch, problem.own_heads, problem.head_dim
        self.gathered = context.empty(shape, context.dtype(problem))

    def __call__(self, q: Tensor, out: Tensor) -> None:
        problem = self.problem
        self.context.all_gather(self.gathered, q)
        whole = out.view(problem.batch, problem.world_size, problem.own_heads, problem.head_dim)
        self.context.copy(whole, self.gathered.transpose(0, 1))

    def changes_for(self, smaller: HeadGather) -> dict[str, Any]:
        """Any number of tokens: the collective is called with the sizes of the call."""
        shape = smaller.world_size, smaller.batch, smaller.own_heads, smaller.head_dim
        flat = self.gathered.view(-1)[: smaller.batch * smaller.heads * smaller.head_dim]
        return {"gathered": flat.view(shape)}


@triton.jit(do_not_specialize=["rank", "tokens"])
def push_kernel(
    q, inbox, flags, bases, control, rank, tokens, room,
    WORLD: tl.constexpr, SENDERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """SENDERS programs per peer share the tokens, of WIDTH elements each; `room` is the capacity of an inbox slot per source."""
    epoch = tl.load(control + EPOCH)
    hop = tl.program_id(0) // SENDERS + 1
    part = tl.program_id(0) % SENDERS
    peer = (rank + hop) % WORLD
    per = tl.cdiv(tokens, SENDERS)
    start = tl.minimum(part * per, tokens)
    end = tl.minimum(start + per, tokens)
    slot = (epoch & 1) * WORLD + rank
    landing = translate(inbox, bases, rank, peer) + slot.to(tl.int64) * room
    copy(landing, q, start * WIDTH, end * WIDTH, BLOCK, ALIGNED)
    signal(flag_address(flags, rank, bases, rank, peer), 1, TARGET, "sys")
    if part == SENDERS - 1:
        source = (rank + WORLD - hop) % WORLD
        wait(flags + source, epoch * SENDERS, source, source, control, TARGET)


@triton.jit(do_not_specialize=["rank"])
def place_kernel(
    q, inbox, out, control, rank, room,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program per token and source."""
    epoch = tl.load(control + EPOCH)
    token = tl.program_id(0) // WORLD
    source = tl.program_id(0) % WORLD
    start = token * WIDTH
    destination = out + token.to(tl.int64) * ((WORLD - 1) * WIDTH) + source * WIDTH  # the place of the element at offset `start`
    if source == rank:
        copy(destination, q, start, start + WIDTH, BLOCK, ALIGNED)
    else:
        slot = ((epoch & 1) * WORLD + source).to(tl.int64)
        copy(destination, inbox + slot * room, start, start + WIDTH, BLOCK, ALIGNED)
    leave(control, epoch, tl.num_programs(0), TARGET)


class Push(Kernel[HeadGather]):
    """Every rank stores its heads in the inboxes of the others, then a flag. A second launch copies them to the output.

    In the first launch one program per source waits, after it has sent. Fewer programs wait than there are ranks, so all the
    others find room. The inbox is [2, source, batch, heads of a rank, head_dim]; the parity of the call selects the slot. A rank
    overwrites a slot two calls later, when it has waited for every peer's flag in between. A source has one flag.
    """

    def __init__(self, problem: HeadGather, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        vector = VECTOR_BYTES // problem.item_size
        self.width = problem.own_heads * problem.head_dim
        self.room = ceil_div(problem.batch * self.width, vector) * vector
        self.inbox = context.heap.alloc((2, problem.world_size, self.room), context.dtype(problem))
        self.flags = context.flags(problem.world_size)
        aligned = vector if self.width % vector == 0 else 1
        self.how = {"WIDTH": self.width, "ALIGNED": aligned, "BLOCK": config["block"], "num_warps": config["num_warps"]}

    def __call__(self, q: Tensor, out: Tensor) -> None:
        context, world, tokens = self.context, self.problem.world_size, self.problem.batch
        if world > 1:
            context.launch(
                push_kernel, ((world - 1) * self.config["senders"],),
                q, self.inbox, self.flags, context.heap.bases, self.control, context.rank, tokens, self.room,
                WORLD=world, SENDERS=self.config["senders"], **self.how,
            )  # fmt: skip
        context.launch(
            place_kernel, (tokens * world,), q, self.inbox, out, self.control, context.rank, self.room, WORLD=world, **self.how
        )

    def changes_for(self, smaller: HeadGather) -> dict[str, Any]:  # noqa: ARG002
        """Any number of tokens: each call raises every flag, whatever it sends."""
        return {}


@triton.jit
def anywhere(missing, TARGET: tl.constexpr):
    """Whether any element of `missing` is nonzero; the result is the same in every thread."""
    any_missing = tl.max(missing.to(tl.int32))
    if TARGET == "cuda":
        any_missing = tl.inline_asm_elementwise(
            "{.reg .pred a, b; setp.ne.s32 a, $1, 0; bar.red.or.pred b, 0, a; selp.s32 $0, 1, 0, b;}",
            "=r,r", [any_missing], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return any_missing


@triton.jit
def await_words(at, inside, safe, epoch, source, control, limit, TARGET: tl.constexpr):
    """The words at `at` when all are of this call, or after `limit` polls, which leaves a note. Masked words count as arrived."""
    mine = epoch.to(tl.int64) << 32
    words = load_whole(at, inside, safe, mine, TARGET)
    missing = anywhere((words >> 32).to(tl.int32) != epoch, TARGET)
    polls = 0
    while (missing != 0) & (polls < limit):
        words = load_whole(at, inside, safe, mine, TARGET)
        missing = anywhere((words >> 32).to(tl.int32) != epoch, TARGET)
        polls += 1
        if polls % 1024 == 0:
            if tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0:
                polls = limit
    if missing != 0:
        note_missing(control, source, source, epoch, tl.min((words >> 32).to(tl.int32)), TARGET)
    return words


@triton.jit
def put(out, data, block, source, total, WORLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the block-th tile of a source's data to its place in the output."""
    lanes = tl.arange(0, BLOCK)
    first = block * BLOCK
    if WIDTH % BLOCK == 0:  # a tile lies in one token, so its stores are wide
        addresses = out + (first // WIDTH).to(tl.int64) * (WORLD * WIDTH) + source * WIDTH + first % WIDTH + lanes
    else:
        at = first + lanes
        addresses = out + (at // WIDTH).to(tl.int64) * (WORLD * WIDTH) + source * WIDTH + at % WIDTH
    tl.store(addresses, data, mask=first + lanes < total)


@triton.jit(do_not_specialize=["rank", "total"])
def gather_words_kernel(
    q, out, inbox, bases, control, epochs, rank, total, room,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`q` and `out` are int32, WIDTH elements a token and rank, `total` here; `inbox` is [2, source, room]."""
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    limit = tl.load(control + LIMIT)
    away = distances(bases, rank, WORLD)
    number = epoch.to(tl.int64) << 32
    blocks = tl.cdiv(total, BLOCK)
    slot = ((epoch & 1) * WORLD).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    for block in tl.range(program, blocks, programs, num_stages=1):
        at = block * BLOCK + lanes
        inside = at < total
        data = tl.load(q + at, mask=inside, other=0)
        words = number | (data.to(tl.int64) & 0xFFFFFFFF)
        for hop in tl.static_range(WORLD - 1):
            landing = (inbox.to(tl.int64) + away[hop]).to(inbox.dtype) + (slot + rank) * room
            store_whole(tl.multiple_of(landing + at, (16,)), words, inside, TARGET)
        put(out, data, block, rank, total, WORLD, WIDTH, BLOCK)
    for block in tl.range(program, blocks * (WORLD - 1), programs, num_stages=1):
        source = (rank + WORLD - 1 - block // blocks) % WORLD
        at = block % blocks * BLOCK + lanes
        inside = at < total
        words = await_words(inbox + (slot + source) * room + at, inside, inbox, epoch, source, control, limit, TARGET)
        put(out, words.to(tl.int32), block % blocks, source, total, WORLD, WIDTH, BLOCK)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + program, epoch + 1)


class Words(Kernel[HeadGather]):
    """One kernel. Heads are sent as words of eight bytes that carry the number of their call. No fences and no flags.

    A word has four bytes of q in its low half and the number of the call in its high half, and is written by one store. So no
    older word has the same number, and a call of fewer tokens writes fewer words. The reader reloads words until all have this
    call's number, then copies their bytes to the output. Programs send all their words before they wait, and all are resident at
    the same time, because the launch is cooperative. A rank overwrites a slot two calls later, after words of every peer.

    The whole program votes whether all words have arrived: see `flash_decode.exchange`. A polled tile has a word for each thread.
    """

    def __init__(self, problem: HeadGather, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.width = problem.own_heads * problem.head_dim * problem.item_size // 4
        block = config["block"]
        self.room = ceil_div(problem.batch * self.width, 16) * 16
        # Zeros are words of call 0. Calls start at 1, so they never match.
        self.inbox = context.heap.zeros((2, problem.world_size, self.room), torch.int64)
        useful = ceil_div(problem.batch * self.width, block) * max(1, problem.world_size - 1)
        self.programs = 1 if context.interpreted else min(config["per_processor"] * context.processors, useful)
        self.epochs = context.empty((self.programs,), torch.int32).fill_(1)
        early = context.hardware.launches_overlap
        self.how: dict[str, Any] = {"WIDTH": self.width, "BLOCK": block, "EARLY": early, "num_warps": config["num_warps"]}
        self.how |= all_resident(context)

    def __call__(self, q: Tensor, out: Tensor) -> None:
        context, problem = self.context, self.problem
        context.launch(
            gather_words_kernel, (self.programs,),
            q.view(-1).view(torch.int32), out.view(-1).view(torch.int32), self.inbox, context.heap.bases, self.control, self.epochs,
            context.rank, problem.batch * self.width, self.room, WORLD=problem.world_size, **self.how,
        )  # fmt: skip

    def changes_for(self, smaller: HeadGather) -> dict[str, Any]:  # noqa: ARG002
        """Any number of tokens: a word carries all 32 bits of its call number."""
        return {}
