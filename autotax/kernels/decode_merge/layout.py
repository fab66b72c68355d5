"""Parts of all variants: the distribution of rows to programs and ranks, and loads and stores of O and LSE.

A row is (query token, head). Inside the kernels log-sum-exps have base 2, and an empty row is (0, -inf), as in `flash_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.context import Context, all_resident
from autotax.kernels.flash_decode.attention import store_rows
from autotax.kernels.kernel import Kernel
from autotax.operators.decode_merge import DecodeMerge

Held = tuple[Tensor, Tensor]
"""Tokens of each sequence on this rank, and the first query token of each sequence: see `holds_nothing`."""


@dataclass(frozen=True)
class Layout:
    rows: int
    """(query token, head) pairs of the problem."""
    arriving: int
    """Rows of which a rank computes the output. It receives the partial results of these rows from every rank."""
    share: int
    """Heads that each rank owns, or 0 where every rank gets all heads."""
    together: int
    """Rows that a program handles together: neighbouring heads of one token, which go to the same ranks."""
    block: dict[str, Any]
    """Constexprs of a block of such rows."""

    @classmethod
    def of(cls, problem: DecodeMerge, config: Config) -> Layout:
        together, dim = config["rows"], problem.head_dim
        assert isinstance(together, int)
        block_d = max(16, power_of_two(dim))
        block = {"GROUP": together, "HEAD_DIM": dim, "BLOCK_G": power_of_two(together), "BLOCK_D": block_d}
        return cls(
            rows=problem.batch * problem.heads, arriving=problem.batch * problem.out_heads,
            share=problem.out_heads if problem.output == "head_scatter" else 0, together=together,
            block=block | {"BASE_E": problem.base == "e"},
        )  # fmt: skip


class MergeKernel(Kernel[DecodeMerge]):
    """A variant built for a number of query tokens that serves any smaller number; memory and flags keep their places."""

    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.layout = Layout.of(problem, config)
        self.how = {"num_warps": config["num_warps"]}

    def changes_for(self, smaller: DecodeMerge) -> dict[str, Any]:  # noqa: ARG002
        """Any number of tokens: missing rows are sent as empty ones, so all flags are raised and all words get the call's tag."""
        return {}

    def own(self, o: Tensor, lse: Tensor, held: Held | None) -> tuple[Any, ...]:
        """Arguments of `load_partial` for this rank's result: O, LSE, the two tensors of `held`, rows, heads, strides of LSE."""
        lens, starts = held or (None, None)
        heads, sequences = self.problem.heads, 0 if lens is None else len(lens)
        return o, lse, lens, starts, sequences, self.problem.batch * heads, heads, lse.stride(0), lse.stride(1)

    @property
    def taken(self) -> int:
        """Rows of the output of a call."""
        return self.problem.batch * self.problem.out_heads


def inbox_of(problem: DecodeMerge, layout: Layout, context: Context) -> tuple[Tensor, Tensor]:
    """The inbox of variants with flags: o [2, world, arriving, head_dim], stored unchanged, and lse. Collective."""
    world, rows = problem.world_size, layout.arriving
    o = context.heap.alloc((2, world, rows, problem.head_dim), context.dtype(problem))
    return o, context.heap.alloc((2, world, rows), torch.float32)


class AtOnce(MergeKernel):
    """One launch of programs that run at the same time: they send, then wait. Each has its own epoch, advanced at its end."""

    KERNEL: Any
    memory: tuple[Tensor, ...]
    """Inboxes of words in the heap. They start as zeros, the tag of call 0, and calls start at 1."""

    def __init__(self, problem: DecodeMerge, config: Config, context: Context, chunk: int) -> None:
        """`chunk`: number of ranks whose results are polled at a time."""
        super().__init__(problem, config, context)
        layout, parts = self.layout, config["parts"]
        blocks = layout.rows // layout.together * parts
        room = config["per_processor"] * context.processors
        # The interpreter runs programs one after the other, so no program may wait before the last has sent.
        self.programs = 1 if context.interpreted else min(room, blocks)
        self.epochs = context.empty((self.programs,), self.control.dtype).fill_(1)
        early = context.hardware.launches_overlap
        self.how |= all_resident(context)
        self.constants = {"CHUNK": chunk, "PARTS": parts, "EARLY": early, "SHARE": layout.share, **layout.block}

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor, held: Held | None = None) -> None:
        context, layout = self.context, self.layout
        context.launch(
            self.KERNEL, (self.programs,),
            *self.own(o, lse, held), out, merged, *self.memory, context.heap.bases, self.control, self.epochs,
            context.rank, self.taken, layout.rows, layout.arriving,
            WORLD=self.problem.world_size, **self.constants, **self.how,
        )  # fmt: skip


@triton.jit
def holds_nothing(lens, starts, sequences, token):
    """Whether the sequence of a query token has no tokens on this rank, or the token lies past the last sequence.

    `lens` int32 [sequences] counts the tokens of each sequence on this rank. `starts` int32 [sequences + 1] gives the first query
    token of each sequence; its last entry is the number of query tokens.
    """
    ended = 0
    for block in tl.range(0, sequences, 128, num_stages=1):
        at = block + tl.arange(0, 128)
        ended += tl.sum((tl.load(starts + 1 + at, mask=at < sequences, other=2147483647) <= token).to(tl.int32))
    length = tl.load(lens + tl.minimum(ended, sequences - 1))
    return (ended >= sequences) | (length == 0)


@triton.jit
def load_partial(
    o, lse, lens, starts, sequences, first, rows, heads, lse_token, lse_head,
    BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads rows first ... first + GROUP of O [tokens, heads, head_dim] and LSE as float32 [BLOCK_G, BLOCK_D] and [BLOCK_G].

    `lse_token` and `lse_head` are the strides of LSE. BLOCK_D may be a part of HEAD_DIM; then `o` points to the first column of
    that part. The result is (0, -inf) for rows from `rows` on, and for rows whose LSE is not finite, whatever O holds there. With
    `lens` it is that too for tokens of sequences without keys on this rank.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    row = first + g
    valid = (g < GROUP) & (row < rows)
    at = lse + (row // heads).to(tl.int64) * lse_token + (row % heads).to(tl.int64) * lse_head
    sums = tl.load(at, mask=valid, other=float("-inf"))
    tile = tl.load(
        o + row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )
    if BASE_E:
        sums = sums * 1.4426950408889634
    some = (sums > float("-inf")) & (sums < float("inf"))
    if lens is not None:
        some = some & (holds_nothing(lens, starts, sequences, first // heads) == 0)
    return tl.where(some[:, None], tile.to(tl.float32), 0.0), tl.where(some, sums, float("-inf"))


@triton.jit
def store_merged(
    o, lse, out, out_lse, first, WITH_LSE,
    BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Writes rows first ... first + GROUP of the merged O [rows, head_dim], and with WITH_LSE of the merged LSE [rows]."""
    g = tl.arange(0, BLOCK_G)
    if TARGET == "interpreter" and tl.bfloat16 == out.dtype.element_ty:
        # The interpreter's own conversion truncates, which has twice the error of rounding.
        bits = o.to(tl.int32, bitcast=True)
        o = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    store_rows(o, out, first + g, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    if BASE_E:
        lse = lse * 0.6931471805599453
    tl.store(out_lse + first + g, lse, mask=(g < GROUP) & WITH_LSE)
