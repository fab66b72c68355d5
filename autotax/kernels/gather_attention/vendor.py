"""Attention by the vendor, part by part, in the variants `bsp`, `heads` and `decomposed`.

No library of torch masks queries that begin behind the first key. So a causal rank attends to its own keys causally and to those
of each other rank without a mask (see `GatherAttention.parts`), and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.all_gather_gemm.push_gather import await_shards, open_slot
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import store_rows
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.kernel import Kernel
from autotax.operators.gather_attention import GatherAttention, Part

Partial = tuple[Tensor, Tensor]
"""O and its log-sum-exps, which may have any strides."""


def attend(library: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
    """Attention of q [batch, queries, q_heads, head_dim] to k and v [batch, keys, kv_heads, head_dim], by an operator of torch.

    `library` is "cudnn", "flash" or "cpu". Returns O, shaped like q, and the log-sum-exps of base e, float32 [batch, q_heads,
    queries]. Both are allocated by torch, in a capture from the graph's pool. With `causal` there are as many queries as keys,
    and the i-th sees the keys up to the i-th.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    aten = torch.ops.aten
    if library == "cudnn":
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    elif library == "flash":
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        o, lse, *_ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return o.transpose(1, 2).contiguous(), lse.reshape(q.shape[:3])


MERGED_ROWS = 32
"""Most rows that a program of the merge handles at a time."""


@triton.jit
def load_part(o, lse, row, heads, of_head, of_token, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """GROUP rows (query, head) of O and their log-sum-exps of base 2, both float32. A NaN stays one: no row is empty."""
    g = row + tl.arange(0, GROUP)
    d = tl.arange(0, BLOCK_D)
    sums = tl.load(lse + (g % heads).to(tl.int64) * of_head + (g // heads) * of_token) * 1.4426950408889634
    return tl.load(o + g.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0).to(tl.float32), sums


@triton.jit(do_not_specialize=["first", "tokens", "added"])
def merge_part_kernel(
    o, lse, more, more_lse, first, tokens, added, heads, of_sequence, of_head, of_token, more_sequence, more_head, more_token,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Merges O of `added` queries into that of `tokens` queries, from query `first` on. GROUP rows (query, head) a program.

    `of_...` and `more_...` are the strides of the log-sum-exps, whose layout differs between libraries.
    """
    sequence = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * GROUP
    rows = added * heads
    o += (sequence * tokens + first) * heads * HEAD_DIM
    lse += sequence * of_sequence + first * of_token
    mine, sums = load_part(o, lse, row, heads, of_head, of_token, GROUP, HEAD_DIM, BLOCK_D)
    more += sequence * rows * HEAD_DIM
    more_lse += sequence * more_sequence
    other, others = load_part(more, more_lse, row, heads, more_head, more_token, GROUP, HEAD_DIM, BLOCK_D)
    top = tl.maximum(sums, others)
    weight = tl.exp2(sums - top)
    weight_of_other = tl.exp2(others - top)
    total = weight + weight_of_other
    merged = mine * (weight / total)[:, None] + other * (weight_of_other / total)[:, None]
    g = row + tl.arange(0, GROUP)
    tl.debug_barrier()  # several warps load the same log-sum-exp: all of them before one stores the merged one
    store_rows(rounded(merged, o.dtype.element_ty, TARGET), o, g.to(tl.int64), GROUP, HEAD_DIM, GROUP, BLOCK_D)
    tl.store(lse + (g % heads).to(tl.int64) * of_head + (g // heads) * of_token, (top + tl.log2(total)) * 0.6931471805599453)


class VendorAttention(Kernel[GatherAttention]):
    """A variant whose attention is the vendor's, part by part. A call returns its result, which is not in the output tensor.

    With KEEPS_LSE `lse` are the log-sum-exps of the last call, [batch, q_heads, queries].
    """

    KEEPS_LSE: ClassVar[bool] = True
    lse: Tensor

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.library = str(config["library"])

    def part(self, part: Part, q: Tensor, k: Tensor, v: Tensor, whole: Partial | None) -> Partial:
        """Attends to a part, whose keys are among the tokens of k and v, and merges the result into `whole`, if that is given."""
        (first, end), keys = part.queries, slice(*part.keys)
        if q.is_meta:
            result = q[:, first:end], q.new_empty(len(q), q.shape[2], end - first, dtype=torch.float32)
        else:  # in a rehearsal too: the library builds a plan for new shapes
            result = attend(self.library, q[:, first:end], k[:, keys], v[:, keys], causal=part.causal)
        if whole is None:
            return result
        problem, rows = self.problem, (end - first) * self.problem.q_heads
        group = math.gcd(rows, MERGED_ROWS)
        constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": problem.head_dim, "BLOCK_D": max(16, power_of_two(problem.head_dim))}
        self.context.launch(
            merge_part_kernel, (rows // group, len(q)), *whole, *result, first, q.shape[1], end - first, problem.q_heads,
            *whole[1].stride(), *result[1].stride(), **constants, num_warps=4,
        )  # fmt: skip
        return whole


class Bsp(VendorAttention):
    """The bulk-synchronous baseline: the collective library gathers K and V, then the vendor's attention works on all of them."""

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shape = problem.world_size, problem.batch, problem.shard_len, problem.kv_heads, problem.head_dim
        self.gathered = context.empty((2, *shape), context.dtype(problem))
        ordered = problem.mask == "none" and problem.batch > 1
        self.ordered = context.empty((2, *shape) if ordered else (0,), self.gathered.dtype)

    def gather(self, k: Tensor, v: Tensor) -> None:
        """One call of the collective library for K and V. Libraries for CPU ranks need two calls."""
        context = self.context
        if not context.dry:
            both = dist._coalescing_manager(group=context.world.data, device=k.device) if k.is_cuda else nullcontext()
            with both:
                for gathered, shard in zip(self.gathered, (k, v), strict=True):
                    context.all_gather(gathered, shard)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:  # noqa: ARG002
        problem = self.problem
        self.gather(k, v)
        if problem.mask == "none":
            whole = self.gathered
            if problem.batch > 1:
                whole = self.ordered.view(2, problem.batch, problem.world_size, *k.shape[1:])
                self.context.copy(whole, self.gathered.transpose(1, 2))
            keys, values = whole.view(2, problem.batch, problem.seq_len, *k.shape[2:])
            everything = Part(self.context.rank, (0, problem.shard_len), (0, problem.seq_len), causal=False)
            o, self.lse = self.part(everything, q, keys, values, None)
            return o
        result: Partial | None = None
        for part in problem.parts(self.context.rank):
            keys, values = (k, v) if result is None else self.gathered[:, part.source]
            result = self.part(part, q, keys, values, result)
        assert result is not None
        o, self.lse = result
        return o

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any]:
        """Any number of sequences and tokens: the collective is called with the sizes of the call."""
        shape = 2, smaller.world_size, smaller.batch, smaller.shard_len, smaller.kv_heads, smaller.head_dim
        kept = {name: memory for name, memory in (("gathered", self.gathered), ("ordered", self.ordered)) if memory.numel()}
        return {name: memory.view(-1)[: math.prod(shape)].view(shape) for name, memory in kept.items()}


class Heads(VendorAttention):
    """All tokens of some heads come together on each rank, the vendor's attention works on them, and its output goes back.

    One all-to-all brings q, k and v of a rank's heads, another one returns the output. Each rank attends to the whole sequence at
    once, so nothing is merged. Ranks exchange queries and outputs too, hence more bytes than keys alone where few KV heads serve
    many query heads.
    """

    KEEPS_LSE = False

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, kind = problem.world_size, context.dtype(problem)
        q_heads, kv_heads, dim = problem.q_heads // world, problem.kv_heads // world, problem.head_dim
        self.bounds = (0, q_heads), (q_heads, q_heads + kv_heads), (q_heads + kv_heads, q_heads + 2 * kv_heads)
        shape = world, problem.batch, problem.shard_len, q_heads + 2 * kv_heads, dim
        self.sent, self.received = context.empty(shape, kind), context.empty(shape, kind)
        self.whole = context.empty((problem.batch, problem.seq_len, q_heads + 2 * kv_heads, dim), kind)
        self.returned, self.arrived = (context.empty((*shape[:3], q_heads, dim), kind) for _ in range(2))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        context, problem, world = self.context, self.problem, self.problem.world_size
        for (first, end), tensor in zip(self.bounds, (q, k, v), strict=True):
            by_rank = tensor.view(problem.batch, problem.shard_len, world, end - first, problem.head_dim)
            context.copy(self.sent[..., first:end, :], by_rank.permute(2, 0, 1, 3, 4))
        context.all_to_all(self.received, self.sent)
        for shard, place in self.places(self.received):
            context.copy(place, shard)
        tokens = (0, problem.seq_len)
        everything = Part(context.rank, tokens, tokens, problem.mask == "causal")
        heads, keys, values = (self.whole[:, :, first:end] for first, end in self.bounds)
        o, _ = self.part(everything, heads, keys, values, None)
        for shard, place in self.places(self.returned, o):
            context.copy(shard, place)
        context.all_to_all(self.arrived, self.returned)
        by_rank = out.view(problem.batch, problem.shard_len, world, -1, problem.head_dim)
        context.copy(by_rank.permute(2, 0, 1, 3, 4), self.arrived)

    def places(self, by_rank: Tensor, whole: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Each chunk of tokens in a tensor by ranks, and its place in the whole sequence."""
        problem, length = self.problem, self.problem.chunk_len
        whole = self.whole if whole is None else whole
        return [
            (by_rank[rank, :, at * length :][:, :length], whole[:, chunk * length :][:, :length])
            for rank in range(problem.world_size)
            for at, chunk in enumerate(problem.chunks_of(rank))
        ]

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any]:
        """Any number of sequences and tokens: the collectives are called with the sizes of the call."""
        batch, tokens = smaller.batch, smaller.shard_len
        changed: dict[str, Any] = {
            name: memory.view(-1, *memory.shape[3:])[: batch * smaller.seq_len].view(-1, batch, tokens, *memory.shape[3:])
            for name, memory in vars(self).items()
            if name in ("sent", "received", "returned", "arrived")
        }
        flat = self.whole.view(-1, *self.whole.shape[2:])
        return changed | {"whole": flat[: batch * smaller.seq_len].view(batch, smaller.seq_len, *self.whole.shape[2:])}


class CopiedKeys(Kernel[GatherAttention]):
    """Keys and values that copy engines bring: the base of variants without a sending kernel.

    The inbox is [2, source, K or V, batch, tokens, kv_heads, head_dim]. A rank gets the keys that its queries see.

    Waits: as in `all_gather_gemm.push_gather`. Every rank raises the flags of all others in each call, even if it sends them no
    keys. Copies run on a stream of their own, and none waits for a kernel of attention.
    """

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rank = problem.world_size, context.rank
        shape = 2, world, 2, problem.batch, problem.shard_len, problem.kv_heads, problem.head_dim
        self.inbox = context.heap.alloc(shape, context.dtype(problem))
        self.arrived, self.begun = context.flags(world), context.flags(world)
        self.ticket = context.empty((1,), self.begun.dtype)
        self.peers = [(rank + hop) % world for hop in range(1, world)]
        self.beside = context.streams(1)
        self.calls = 0

    def send_all(self, k: Tensor, v: Tensor) -> int:
        """Enqueues all sends. Returns the slot of the inbox that this call uses. `context.rejoin` must follow."""
        context, rank = self.context, self.context.rank
        slot = self.calls % 2
        self.calls += not context.dry
        context.launch(
            open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, rank, slot,
            WORLD=self.problem.world_size, num_warps=1,
        )  # fmt: skip
        with context.beside(self.beside[0]):
            for peer in self.peers:
                self.send(k, v, self.inbox[slot, rank], peer)
        return slot

    def send(self, k: Tensor, v: Tensor, landing: Tensor, peer: int) -> None:
        """Copies the keys and values that a peer needs into its inbox, then the flag."""
        context, rank = self.context, self.context.rank
        for part in self.problem.parts(peer):
            if part.source == rank:
                keys = slice(*part.keys)
                for target, shard in zip(context.heap.peer(landing, peer), (k, v), strict=True):
                    context.copy(target[:, keys], shard[:, keys])
        context.copy(context.heap.peer(self.arrived[rank : rank + 1], peer), self.ticket)

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any] | None:
        """Any number of sequences and tokens: there is one flag per rank, and the host chooses where the two slots begin."""
        shape = smaller.world_size, 2, smaller.batch, smaller.shard_len, smaller.kv_heads, smaller.head_dim
        return {"inbox": self.inbox.view(2, -1)[:, : math.prod(shape)].view(2, *shape)}


class Decomposed(CopiedKeys, VendorAttention):
    """The copy engines send K and V to the other ranks, while the vendor's attention works on the keys that are here.

    A rank first attends to its own keys, then to those of rank - 1, rank - 2 and so on, each as soon as they have arrived.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:  # noqa: ARG002
        context, problem, rank = self.context, self.problem, self.context.rank
        inbox = self.inbox[self.send_all(k, v)]
        own, *others = problem.parts(rank)
        whole = self.part(own, q, k, v, None)
        parts = {part.source: part for part in others}
        for hop in range(1, problem.world_size):
            source = (rank - hop) % problem.world_size
            context.launch(
                await_shards, (1,), self.arrived, self.control, rank, hop, hop + 1, 1,
                LAST=hop == problem.world_size - 1, WORLD=problem.world_size, num_warps=1,
            )  # fmt: skip
            if source in parts:
                keys, values = inbox[source]
                whole = self.part(parts[source], q, keys, values, whole)
        context.rejoin(self.beside)
        o, self.lse = whole
        return o
