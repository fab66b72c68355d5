"""Attention by the vendor, part by part, in the variants `bsp`, `heads` and `decomposed`.

No library of torch masks queries that begin behind the first key. So a causal rank attends to its own keys causally and to those
of each other rank without a mask (see `GatherAttention.parts`), and the results are merged by their log-sum-exps. With windows
some parts have a bound on the left, too, which cuDNN's attention lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
from autotax.operators.gather_attention import GatherAttention, Part, Stream

Partial = tuple[Tensor, Tensor]
"""O and its log-sum-exps, which may have any strides."""


def attend(library: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, left: int | None = None) -> Partial:
    """Attention of q [batch, queries, q_heads, head_dim] to k [batch, keys, kv_heads, head_dim] and v, by an operator of torch.

    `library` is "cudnn", "flash" or "cpu". Returns O [batch, queries, q_heads, elements of a head of v] and the log-sum-exps of base
    e, float32 [batch, q_heads, queries]. Both are allocated by torch, in a capture from the graph's pool. With `causal` or
    `left` there are as many queries as keys. Causally, the i-th sees the keys up to the i-th. With `left` the i-th sees no key before
    the (i - left)-th, which cuDNN's attention does not support.
    """
    aten, dim = torch.ops.aten, v.shape[3]
    if library != "cudnn":
        v = widened(v, q.shape[3])
    if library == "flash" and left is not None:
        o, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, **bounds(causal, left))
        return o[..., :dim].contiguous(), lse
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if library == "cudnn":
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    elif library == "flash":
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        o, lse, *_ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, **masked(q, k, causal, left))
    return o[..., :dim].transpose(1, 2).contiguous(), lse.reshape(q.shape[:3])


def widened(tensor: Tensor, dim: int) -> Tensor:
    """Heads of `dim` elements, the last ones zero: most libraries take heads of one size."""
    return tensor if tensor.shape[3] == dim else torch.nn.functional.pad(tensor, (0, dim - tensor.shape[3]))


def bounds(causal: bool, left: int) -> dict[str, int]:
    """The window of flash attention."""
    return {"window_size_left": left} | ({"window_size_right": 0} if causal else {})


def masked(q: Tensor, k: Tensor, causal: bool, left: int | None) -> dict[str, Any]:
    """The mask of attention for CPUs; q and k are [batch, heads, tokens, head_dim]."""
    if left is None:
        return {"is_causal": causal}
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(-left)
    seen = seen.tril() if causal else seen
    return {"attn_mask": torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)}


def cut(pieces: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor [batch, tokens, ...] as [batch * pieces, tokens / pieces, ...]."""
    return tensors if pieces == 1 else tuple(tensor.reshape(-1, tensor.shape[1] // pieces, *tensor.shape[2:]) for tensor in tensors)


def attend_part(library: str, part: Part, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attention of the queries of a part to its keys, which are among the tokens of k and v."""
    queries, keys, pieces = slice(*part.queries), slice(*part.keys), part.pieces
    o, lse = attend(library, *cut(pieces, q[:, queries], k[:, keys], v[:, keys]), causal=part.causal, left=part.left)
    if pieces == 1:
        return o, lse
    lse = lse.view(len(q), pieces, *lse.shape[1:]).transpose(1, 2)
    return o.view(len(q), -1, *o.shape[2:]), lse.reshape(*lse.shape[:2], -1)


def attend_ragged(library: str, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ends: Tensor, how: Part) -> Partial:
    """Attention within sequences of these lengths, one after the other along the tokens of a batch of one. `how` says which keys a
    query sees. `ends` are the sums of the lengths, from 0 on, int32 on the device of q.
    """
    if library == "cpu":
        shards = zip(*(tensor.split(list(lengths), 1) for tensor in (q, k, v)), strict=True)
        results = [attend(library, *shard, causal=how.causal, left=how.left) for shard in shards]
        return torch.cat([o for o, _ in results], 1), torch.cat([lse for _, lse in results], 2)
    most, dim = max(lengths), v.shape[3]
    sequences = q[0], k[0], widened(v, q.shape[3])[0], ends, ends, most, most
    window = {} if how.left is None else bounds(how.causal, how.left)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(*sequences, 0.0, how.causal, False, **window)
    if lse.dim() == 3:  # by sequences, as some versions give it
        lse = torch.cat([of_one[:, :length] for of_one, length in zip(lse, lengths, strict=True)], 1)
    return o[None, ..., :dim].contiguous(), lse[None]


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
        self.library, self.squares = str(config["library"]), int(config["squares"])

    def part(self, part: Part, q: Tensor, k: Tensor, v: Tensor, whole: Partial | None) -> Partial:
        """Attends to a part, whose keys are among the tokens of k and v, and merges the result into `whole`.

        Without `whole` the part has all queries.
        """
        for square in part.squares(self.squares):
            (first, end), dim = square.queries, self.problem.value_dim
            if q.is_meta:
                result = q[:, first:end, :, :dim], q.new_empty(len(q), q.shape[2], end - first, dtype=torch.float32)
            else:  # in a rehearsal too: the library builds a plan for new shapes
                result = attend_part(self.library, square, q, k, v)
            whole = result if whole is None else self.merge(whole, result, first)
        assert whole is not None
        return whole

    def merge(self, whole: Partial, result: Partial, first: int) -> Partial:
        """Merges the result of some queries, from `first` on, into that of all queries of a rank."""
        (o, sums), (more, more_sums) = whole, result
        added, heads, dim = more.shape[1:]
        group = math.gcd(added * heads, MERGED_ROWS)
        constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": dim, "BLOCK_D": max(16, power_of_two(dim))}
        self.context.launch(
            merge_part_kernel, (added * heads // group, len(o)), o, sums, more, more_sums, first, o.shape[1], added, heads,
            *sums.stride(), *more_sums.stride(), **constants, num_warps=4,
        )  # fmt: skip
        return whole


class Bsp(VendorAttention):
    """The bulk-synchronous baseline: the collective library gathers K and V, then the vendor's attention works on all of them."""

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shapes, kind = shapes_of_all(problem), context.dtype(problem)
        ordered = problem.mask == "none" and problem.batch > 1
        self.gathered = [context.empty(shape, kind) for shape in shapes]
        self.ordered = [context.empty(shape, kind) for shape in shapes] if ordered else []

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
                whole = self.ordered
                for ordered, gathered in zip(self.ordered, self.gathered, strict=True):
                    self.context.copy(ordered.view(problem.batch, problem.world_size, *gathered.shape[2:]), gathered.transpose(0, 1))
            keys, values = (tensor.view(problem.batch, problem.seq_len, *tensor.shape[3:]) for tensor in whole)
            everything = Part(self.context.rank, (0, problem.shard_len), (0, problem.seq_len), causal=False)
            o, self.lse = self.part(everything, q, keys, values, None)
            return o
        result: Partial | None = None
        for part in problem.parts(self.context.rank):
            own = part.source == self.context.rank
            keys, values = (k, v) if own else (tensor[part.source] for tensor in self.gathered)
            result = self.part(part, q, keys, values, result)
        assert result is not None
        o, self.lse = result
        return o

    def stream(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream, ends: Tensor) -> Partial:
        """Attention within the sequences of a stream (see `attend_ragged`). Keys are gathered if any rank needs those of another."""
        if stream.crosses:
            self.gather(k, v)
        library = "flash" if self.library == "cudnn" else self.library
        whole = attend_ragged(library, q, k, v, stream.own, ends, self.problem.everything)
        for part in stream.parts:
            keys, values = (tensor[part.source] for tensor in self.gathered)
            whole = self.part(part, q, keys, values, whole)
        return whole

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any]:
        """Any number of sequences and tokens: the collective is called with the sizes of the call."""
        return {
            name: [tensor.view(-1)[: math.prod(shape)].view(shape) for tensor, shape in zip(memory, shapes_of_all(smaller), strict=False)]
            for name, memory in (("gathered", self.gathered), ("ordered", self.ordered))
        }


def shapes_of_all(problem: GatherAttention) -> list[tuple[int, ...]]:
    """The shapes of K and V of all ranks, by ranks."""
    shape = problem.world_size, problem.batch, problem.shard_len, problem.kv_heads
    return [(*shape, problem.head_dim), (*shape, problem.value_dim)]


class Heads(VendorAttention):
    """All tokens of some heads come together on each rank, the vendor's attention works on them, and its output goes back.

    One all-to-all brings q, k and v of a rank's heads, another one returns the output. Each rank attends to the whole sequence at
    once, so nothing is merged. Ranks exchange queries and outputs too, hence more bytes than keys alone where few KV heads serve
    many query heads. With several `pieces` of a rank's heads, attention to one piece runs beside the exchange of the next one and
    the return of the one before (the sequence parallelism of DeepSpeed-Ulysses, arXiv 2309.14509, overlapped).
    """

    KEEPS_LSE = False

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, kind, pieces = problem.world_size, context.dtype(problem), int(config["pieces"])
        q_heads, kv_heads = problem.q_heads // world // pieces, problem.kv_heads // world // pieces
        self.dims = problem.head_dim, problem.head_dim, problem.value_dim
        sizes = [heads * dim for heads, dim in zip((q_heads, kv_heads, kv_heads), self.dims, strict=True)]
        self.bounds = [(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(3)]
        shape = pieces, world, problem.batch, problem.shard_len
        self.sent, self.received = (context.empty((*shape, sum(sizes)), kind) for _ in range(2))
        self.whole = context.empty((pieces, problem.batch, problem.seq_len, sum(sizes)), kind)
        self.returned, self.arrived = (context.empty((*shape, q_heads * problem.value_dim), kind) for _ in range(2))
        # Urgent, or attention would have all processors before the exchange beside it gets one.
        self.side = context.streams(1, urgent=True) if pieces > 1 else []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        pieces, outputs = len(self.whole), list[Tensor]()
        with self.aside():
            self.bring(0, q, k, v)
        for piece in range(pieces):
            self.context.rejoin(self.side)
            with self.aside():
                if piece + 1 < pieces:
                    self.bring(piece + 1, q, k, v)
                if piece:
                    self.give_back(piece - 1, outputs[-1], out)
            heads, keys, values = (
                self.whole[piece][..., first:end].unflatten(2, (-1, dim))
                for (first, end), dim in zip(self.bounds, self.dims, strict=True)
            )
            outputs.append(self.part(self.problem.everything, heads, keys, values, None)[0])
        with self.aside():
            self.give_back(pieces - 1, outputs[-1], out)
        self.context.rejoin(self.side)  # until then `outputs` keeps the memory that the side stream reads

    def aside(self) -> AbstractContextManager[Any]:
        """Work beside what follows, where there are several pieces."""
        return self.context.beside(self.side[0]) if self.side else nullcontext()

    def bring(self, piece: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Sends each rank this piece of its heads, and puts what has come into the order of the sequence."""
        context, sent = self.context, self.sent[piece]
        for (first, end), tensor in zip(self.bounds, (q, k, v), strict=True):
            by_rank = tensor.view(*tensor.shape[:2], self.problem.world_size, len(self.sent), end - first)[:, :, :, piece]
            context.copy(sent[..., first:end], by_rank.permute(2, 0, 1, 3))
        context.all_to_all(self.received[piece], sent)
        for shard, place in self.places(self.received[piece], self.whole[piece]):
            context.copy(place, shard)

    def give_back(self, piece: int, o: Tensor, out: Tensor) -> None:
        """Returns the output of a piece to the ranks that have its tokens."""
        context = self.context
        for shard, place in self.places(self.returned[piece], o.flatten(2)):
            context.copy(shard, place)
        context.all_to_all(self.arrived[piece], self.returned[piece])
        by_rank = out.view(*out.shape[:2], self.problem.world_size, len(self.sent), -1)[:, :, :, piece]
        context.copy(by_rank.permute(2, 0, 1, 3), self.arrived[piece])

    def places(self, by_rank: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each chunk of tokens in a tensor by ranks, and its place in the whole sequence."""
        problem, length = self.problem, self.problem.chunk_len
        return [
            (by_rank[rank, :, at * length :][:, :length], whole[:, chunk * length :][:, :length])
            for rank in range(problem.world_size)
            for at, chunk in enumerate(problem.chunks_of(rank))
        ]

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any]:
        """Any number of sequences and tokens: the collectives are called with the sizes of the call."""

        def first(memory: Tensor, *shape: int) -> Tensor:
            width = memory.shape[-1]
            return memory.flatten(1)[:, : math.prod(shape) * width].view(len(memory), *shape, width)

        shape = smaller.world_size, smaller.batch, smaller.shard_len
        changed: dict[str, Any] = {name: first(getattr(self, name), *shape) for name in ("sent", "received", "returned", "arrived")}
        return changed | {"whole": first(self.whole, smaller.batch, smaller.seq_len)}


class CopiedKeys(Kernel[GatherAttention]):
    """Keys and values that copy engines bring: the base of variants without a sending kernel.

    The inbox is [2, source, K or V, batch, tokens, kv_heads, head_dim]; K and V with heads of different sizes have an inbox each,
    [2, source, 1, ...]. A rank gets the keys that its queries see.

    Waits: as in `all_gather_gemm.push_gather`. Every rank raises the flags of all others in each call, even if it sends them no
    keys. Copies run on `streams` of their own, each to other peers, and none waits for a kernel of attention.
    """

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rank = problem.world_size, context.rank
        self.inbox = [context.heap.alloc(shape, context.dtype(problem)) for shape in self.shapes(problem)]
        self.arrived, self.begun = context.flags(world), context.flags(world)
        self.ticket = context.empty((1,), self.begun.dtype)
        self.peers = [(rank + hop) % world for hop in range(1, world)]
        self.beside = context.streams(min(int(config.values.get("streams", 1)), len(self.peers)))
        self.calls = 0

    @staticmethod
    def shapes(problem: GatherAttention) -> list[tuple[int, ...]]:
        """The shape of each inbox."""
        dims = (problem.head_dim, problem.v_dim) if problem.v_dim else (problem.head_dim,)
        shape = problem.batch, problem.shard_len, problem.kv_heads
        return [(2, problem.world_size, 3 - len(dims), *shape, dim) for dim in dims]

    def places(self, slot: int, source: int) -> list[Tensor]:
        """Where the keys of a source lie in this rank's inbox, and where its values lie."""
        return [place for inbox in self.inbox for place in inbox[slot, source]]

    def send_all(self, k: Tensor, v: Tensor) -> int:
        """Enqueues all sends. Returns the slot of the inbox that this call uses. `context.rejoin` must follow."""
        context, rank = self.context, self.context.rank
        slot = self.calls % 2
        self.calls += not context.dry
        context.launch(
            open_slot, (1,), self.ticket, context.heap.bases, self.begun, self.control, rank, slot,
            WORLD=self.problem.world_size, num_warps=1,
        )  # fmt: skip
        for lane, stream in enumerate(self.beside):
            with context.beside(stream):
                for peer in self.peers[lane :: len(self.beside)]:
                    self.send(k, v, self.places(slot, rank), peer)
        return slot

    def sent_to(self, peer: int) -> list[tuple[int, int]]:
        """The tokens whose keys and values a peer needs: ranges of first and end."""
        return self.problem.keys_sent(self.context.rank, peer)

    def send(self, k: Tensor, v: Tensor, places: list[Tensor], peer: int) -> None:
        """Copies the keys and values that a peer needs into its inbox, then the flag."""
        context, rank = self.context, self.context.rank
        for first, end in self.sent_to(peer):
            for place, shard in zip(places, (k, v), strict=True):
                context.copy(context.heap.peer(place, peer)[:, first:end], shard[:, first:end])
        context.copy(context.heap.peer(self.arrived[rank : rank + 1], peer), self.ticket)

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any] | None:
        """Any number of sequences and tokens: there is one flag per rank, and the host chooses where the two slots begin."""
        pairs = zip(self.inbox, self.shapes(smaller), strict=True)
        return {"inbox": [inbox.view(2, -1)[:, : math.prod(shape[1:])].view(shape) for inbox, shape in pairs]}


class Decomposed(CopiedKeys, VendorAttention):
    """The copy engines send K and V to the other ranks, while the vendor's attention works on the keys that are here.

    A rank first attends to its own keys, then to those of rank - 1, rank - 2 and so on, each as soon as they have arrived.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:  # noqa: ARG002
        context, problem, rank = self.context, self.problem, self.context.rank
        slot = self.send_all(k, v)
        whole: Partial | None = None
        parts = problem.parts(rank)
        for part in parts:
            if part.source == rank:
                whole = self.part(part, q, k, v, whole)
        for hop in range(1, problem.world_size):
            source = (rank - hop) % problem.world_size
            context.launch(
                await_shards, (1,), self.arrived, self.control, rank, hop, hop + 1, 1,
                LAST=hop == problem.world_size - 1, WORLD=problem.world_size, num_warps=1,
            )  # fmt: skip
            for part in parts:
                if part.source == source:
                    keys, values = self.places(slot, source)
                    whole = self.part(part, q, keys, values, whole)
        context.rejoin(self.beside)
        assert whole is not None
        o, self.lse = whole
        return o
