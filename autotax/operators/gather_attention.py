"""Gather + attention: prefill attention over sequence shards. Each rank attends with its queries to the keys of all ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from autotax.core.errors import UsageError
from autotax.core.problem import Problem, choice, dtype, ranks, require_grouped, size
from autotax.hardware import Hardware, links_us
from autotax.operators.declaration import Operator, Rates

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.inputs import Call, Draw


class Part(NamedTuple):
    """Attention of some of a rank's queries to some keys of one rank; all bounds are (first, end) of local tokens."""

    source: int
    """The rank that has the keys."""
    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    """Whether the i-th query sees the keys up to the i-th; else it sees all keys of the part."""
    left: int | None = None
    """The i-th of as many queries as keys sees no key before the (i - left)-th. None: there is no such bound."""
    pieces: int = 1
    """Queries and keys are cut into this many equal pieces. A piece of queries sees only the piece of keys in its place."""

    @property
    def pairs(self) -> int:
        """The (query, key) pairs that see each other."""
        queries, keys = ((end - first) // self.pieces for first, end in (self.queries, self.keys))
        area = queries * (queries + 1) // 2 if self.causal else queries * keys
        hidden = 0 if self.left is None else queries - 1 - self.left  # the keys before the last query's first one
        return self.pieces * (area - hidden * (hidden + 1) // 2)

    def squares(self, count: int) -> list[Part]:
        """A causal part cut into squares of `count` rows: those along the diagonal, all in one part, then those below.

        The first part has all queries. The part stays whole if it is not causal, has another bound, or does not divide.
        """
        (first, end), begin = self.queries, self.keys[0]
        size, rest = divmod(end - first, count)
        if count == 1 or rest or not self.causal or self.left is not None or self.pieces > 1:
            return [self]
        below = [
            Part(self.source, (first + row, first + row + size), (begin + column, begin + column + size), causal=False)
            for row in range(size, end - first, size)
            for column in range(0, row, size)
        ]
        return [self._replace(pieces=count), *below]


class Stream(NamedTuple):
    """Sequences one after the other along the tokens of all ranks, as one rank attends to them."""

    own: list[int]
    """The lengths of the sequences within the tokens of this rank."""
    parts: list[Part]
    """The parts whose keys other ranks have."""
    crosses: bool
    """Whether any sequence lies on several ranks."""


@dataclass(frozen=True)
class GatherAttention(Problem):
    """Attention of a rank's queries to the keys and values of all ranks. Each rank has its tokens of the sequence.

    q [batch, S, q_heads, head_dim]; k and v [batch, S, kv_heads, head_dim]; the output is shaped like q. S = seq_len /
    world_size. Scores are scaled by 1 / sqrt(head_dim). Each KV head serves q_heads / kv_heads query heads.

    - `mask="causal"`: a query sees the keys of its own position and of those before. With `"none"` it sees all keys.
    - `layout="contiguous"`: rank r has tokens r*S ... r*S + S - 1. With `"zigzag"` the sequence is cut into 2 * world_size
      chunks, and rank r has chunks r and 2 * world_size - 1 - r. So all ranks have equal work under a causal mask.
    - `window` > 0, with a causal mask: a query sees the key of its own position and those of the window - 1 positions before.
    - `v_dim` > 0: heads of v and of the output have that many elements, fewer than head_dim. 0: all have head_dim.
    """

    batch: int = size("sequences", most=65535, varying=True)
    q_heads: int = size("query heads", most=4096)
    kv_heads: int = size("KV heads", most=4096)
    head_dim: int = size("elements of a head, a multiple of 8", most=256)
    seq_len: int = size("tokens of a sequence on all ranks", varying=True)
    dtype: str = dtype(allowed=("bf16", "fp16"))
    world_size: int = ranks()
    mask: str = choice("causal or none", ("causal", "none"), default="causal")
    layout: str = choice("contiguous or zigzag: the tokens that a rank has", ("contiguous", "zigzag"), default="contiguous")
    window: int = size("tokens that a query sees, its own and the last ones before; 0: all", least=0, default=0, unnamed=True)
    v_dim: int = size("elements of a head of V, a multiple of 8, fewer than of K; 0: as many", least=0, default=0, unnamed=True)

    op: ClassVar[str] = "gather-attention"

    def check(self) -> None:
        require_grouped(self)
        if self.head_dim % 8:
            raise UsageError(f"head_dim is {self.head_dim}; it must be a multiple of 8: give another --head-dim")
        if self.v_dim % 8 or self.v_dim >= self.head_dim:
            raise UsageError(
                f"v_dim is {self.v_dim} and head_dim {self.head_dim}; v_dim must be a multiple of 8 below head_dim, or 0 for "
                "head_dim: give another --v-dim"
            )
        if self.window and self.mask == "none":
            raise UsageError(f"window is {self.window} and mask is none; a window needs a causal mask: give --mask causal")
        if self.layout == "zigzag" and self.mask == "none":
            raise UsageError(
                "layout is zigzag and mask is none; without a mask the order of tokens does not matter: give --layout contiguous"
            )
        if self.seq_len % (self.world_size * self.chunks):
            raise UsageError(
                f"seq_len is {self.seq_len} on {self.world_size} ranks; with --layout {self.layout} it must be a multiple of "
                f"{self.world_size * self.chunks}: give another --seq-len"
            )

    @cached_property
    def chunks(self) -> int:
        """Chunks of the sequence that a rank has."""
        return 2 if self.layout == "zigzag" else 1

    @cached_property
    def shard_len(self) -> int:
        """Tokens of each sequence on a rank."""
        return self.seq_len // self.world_size

    @cached_property
    def chunk_len(self) -> int:
        """Tokens of a chunk."""
        return self.shard_len // self.chunks

    @cached_property
    def value_dim(self) -> int:
        """Elements of a head of v and of the output."""
        return self.v_dim or self.head_dim

    @cached_property
    def windowed(self) -> bool:
        """Whether some query does not see all earlier keys."""
        return 0 < self.window < self.seq_len

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of the chunks of a rank, in the order of its tokens, which is that of the sequence."""
        return (rank, 2 * self.world_size - 1 - rank)[: self.chunks]

    def parts(self, rank: int) -> list[Part]:
        """The parts of a rank's attention, its own keys first, then those of rank - 1, rank - 2 and so on.

        The queries and keys of two ranks that see each other form a rectangle. In the zigzag layout all queries see the first
        chunk of a lower rank. The second chunk of queries sees all keys of a higher rank. See `_windows` for windows. The first
        part has all queries of the rank.
        """
        return self._parts[rank]

    @cached_property
    def _parts(self) -> list[list[Part]]:
        """The parts of all ranks, made once."""
        return [self._parts_of(rank) for rank in range(self.world_size)]

    def _parts_of(self, rank: int) -> list[Part]:
        if self.windowed:
            return self._windows(rank)
        whole, chunk = (0, self.shard_len), self.chunk_len
        parts = [Part(rank, whole, whole, self.mask == "causal")]
        for hop in range(1, self.world_size):
            source = (rank - hop) % self.world_size
            if self.mask == "none":
                parts.append(Part(source, whole, whole, causal=False))
            elif source < rank:
                parts.append(Part(source, whole, (0, chunk), causal=False))
            elif self.layout == "zigzag":
                parts.append(Part(source, (chunk, 2 * chunk), whole, causal=False))
        return parts

    def _windows(self, rank: int) -> list[Part]:
        """The parts of a rank whose queries have windows: its chunks by themselves, then pairs of chunks, by rank of the keys.

        Query i of a chunk sees key j of an earlier chunk if i + distance - j < window. So a window shorter than the distance ends
        among the keys: the first queries see the last keys, each one key less than the query before.
        """
        length, whole = self.chunk_len, (0, self.shard_len)
        parts = [Part(rank, whole, whole, True, self.window - 1 if self.window < length else None, self.chunks)]
        for hop in range(self.world_size):
            source = (rank - hop) % self.world_size
            for of_keys, keys in enumerate(self.chunks_of(source)):
                for of_queries, queries in enumerate(self.chunks_of(rank)):
                    if keys < queries:
                        first, begin = of_queries * length, of_keys * length
                        parts += self._seen(source, (first, first + length), (begin, begin + length), (queries - keys) * length)
        return parts

    def _seen(self, source: int, queries: tuple[int, int], keys: tuple[int, int], distance: int) -> list[Part]:
        """The parts of some queries and earlier keys: the first query lies `distance` behind the first key.

        There are two at most: a rectangle, and as many queries as keys with a bound, if the window ends among the keys.
        """
        if not self.window:
            return [Part(source, queries, keys, causal=False)]
        hidden = distance - self.window + 1  # keys that the first query does not see; below zero, as many queries have no bound
        begin, end = keys[0] + max(0, hidden), keys[1]
        count = min(queries[1] - queries[0], keys[1] - keys[0] - hidden)
        if count <= 0:
            return []
        first, last = queries[0], queries[0] + count
        left, more = max(0, -hidden), end - begin - count
        if left >= count - 1:
            return [Part(source, (first, last), (begin, end), causal=False)]
        if more > 0:  # keys
            whole, bounded = ((first, last), (end - more, end)), ((first, last), (begin, end - more))
        else:
            whole, bounded = ((first, first - more), (begin, end)), ((first - more, last), (begin, end))
        parts = [Part(source, *bounded, False, left - max(0, -more))]
        return [*parts, Part(source, *whole, causal=False)] if more else parts

    @cached_property
    def everything(self) -> Part:
        """The whole sequence, where one rank has it in order."""
        whole = 0, self.seq_len
        return Part(0, whole, whole, self.mask == "causal", self.window - 1 if self.windowed else None)

    def parts_of_prefix(self, rank: int, earlier: int) -> list[Part]:
        """The parts of a rank's queries and the keys of `earlier` tokens just before the sequence, which every rank has."""
        if not self.window:
            return [Part(rank, (0, self.shard_len), (0, earlier), causal=False)]
        length = self.chunk_len
        return [
            part
            for at, chunk in enumerate(self.chunks_of(rank))
            for part in self._seen(rank, (at * length, at * length + length), (0, earlier), chunk * length + earlier)
        ]

    def stream(self, rank: int, lengths: Sequence[int]) -> Stream:
        """Sequences of these lengths, one after the other over contiguous ranks, as a rank attends to them.

        No query sees another sequence. So only a rank's first sequence may see keys of lower ranks, and without a mask its last
        one keys of higher ranks.
        """
        own, parts, crosses, size = [], [], False, self.shard_len
        begin, limit = rank * size, rank * size + size
        ends = list(accumulate(lengths))
        for first, end in zip((0, *ends), ends, strict=False):
            crosses |= first // size < (end - 1) // size
            if end <= begin or first >= limit:
                continue
            queries = max(first, begin) - begin, min(end, limit) - begin
            own.append(queries[1] - queries[0])
            for hop in range(1, self.world_size):
                source = (rank - hop) % self.world_size
                keys = max(0, first - source * size), min(size, end - source * size)
                if keys[0] < keys[1] and (source < rank or self.mask == "none"):
                    parts += self._seen(source, queries, keys, (rank - source) * size + queries[0] - keys[0])
        return Stream(own, parts, crosses)

    def keys_sent(self, source: int, reader: int) -> list[tuple[int, int]]:
        """The tokens of a rank whose keys and values another one needs, as ranges (first, end) in order that do not touch."""
        ranges: list[tuple[int, int]] = []
        for first, end in sorted(part.keys for part in self.parts(reader) if part.source == source):
            if ranges and first <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((first, end))
        return ranges

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs of a rank, of one head of one sequence, that see each other."""
        return sum(part.pairs for part in self.parts(rank))

    @property
    def nbytes(self) -> int:
        of_heads = (self.q_heads + self.kv_heads) * (self.head_dim + self.value_dim)
        return self.batch * self.shard_len * of_heads * self.item_size

    @property
    def flops(self) -> int:
        """The operations of the rank with the most pairs."""
        most = max(map(self.pairs, range(self.world_size)))
        return 2 * self.batch * self.q_heads * (self.head_dim + self.value_dim) * most

    def brief(self) -> str:
        """`B 1, 64/8 heads, 8K, zigzag`"""
        length = f"{self.seq_len // 1024}K" if self.seq_len % 1024 == 0 else str(self.seq_len)
        unusual = [self.layout] if self.layout != "contiguous" else []
        unusual += ["no mask"] if self.mask == "none" else []
        unusual += [f"window {self.window}"] if self.window else []
        unusual += [f"dim {self.head_dim}"] if self.head_dim != 128 and not self.v_dim else []
        unusual += [f"dims {self.head_dim}/{self.v_dim}"] if self.v_dim else []
        unusual += [self.dtype] if self.dtype != "bf16" else []
        return ", ".join((f"B {self.batch}", f"{self.q_heads}/{self.kv_heads} heads", length, *unusual))


operator = Operator(GatherAttention)
operator.example(
    on_gpu=GatherAttention(1, 64, 8, 128, 8192, layout="zigzag"), on_cpu=GatherAttention(2, 4, 2, 32, 96, layout="zigzag")
)


@operator.inputs
def draw(problem: GatherAttention, draw: Draw) -> Call:
    """The rank's q, k and v -> its output."""
    from autotax.operators.inputs import SPREADS, Call, powers, scale

    shape = problem.batch, problem.shard_len
    q = draw.normal(*shape, problem.q_heads, problem.head_dim, tensor=30)
    k = draw.normal(*shape, problem.kv_heads, problem.head_dim, tensor=31)
    v = draw.normal(*shape, problem.kv_heads, problem.value_dim, tensor=32)
    if draw.extreme:
        reach, seed, heads = SPREADS[problem.dtype], draw.seed, problem.kv_heads
        keys = powers((heads, problem.head_dim), reach.channel, seed, 30)
        values = powers((heads, 1), reach.head, seed, 31) * powers((heads, problem.value_dim), reach.value, seed, 32)
        scale(q, (1 / keys).repeat_interleave(problem.q_heads // heads, 0))
        scale(k, keys)
        scale(v, values)
        if draw.rank == 0 and not problem.windowed:  # the first token is the only one that every query sees, without a window
            # No infinity: torch's context parallelism, an alternative, merges it into a NaN.
            v[-1, 0, -1, (seed + problem.value_dim // 2) % problem.value_dim] = math.nan
    return Call((q, k, v), draw.empty(*shape, problem.q_heads, problem.value_dim))


MOST_SCORES = 1 << 28
"""Most scores that the reference holds at a time, twice: 1 GiB of float32."""


@operator.reference
def reference(problem: GatherAttention, calls: Sequence[Call], rank: int) -> tuple[Tensor, Tensor]:
    """Softmax attention in float32 over the whole sequence, some rows at a time; and its spread."""
    import torch

    from autotax.operators.verification import unit

    q = calls[rank].tensors[0]
    ordered = {
        chunk: [tensor[:, at * problem.chunk_len :][:, : problem.chunk_len] for tensor in call.tensors[1:]]
        for source, call in enumerate(calls)
        for at, chunk in enumerate(problem.chunks_of(source))
    }
    keys, values = (torch.cat([ordered[chunk][which] for chunk in sorted(ordered)], 1) for which in (0, 1))
    tokens = torch.arange(problem.chunk_len, device=q.device)
    places = torch.cat([chunk * problem.chunk_len + tokens for chunk in problem.chunks_of(rank)])
    right, spread = (torch.empty((*q.shape[:3], problem.value_dim), device=q.device) for _ in range(2))
    group = problem.q_heads // problem.kv_heads
    rows = min(problem.shard_len, max(1, MOST_SCORES // (group * problem.seq_len)))
    buffers = torch.empty(2, group * rows * problem.seq_len, device=q.device)
    for sequence in range(problem.batch):
        for head in range(problem.kv_heads):
            of_group = slice(head * group, head * group + group)
            k, v = (tensor[sequence, :, head].float() for tensor in (keys, values))
            size = v.clone()
            most = unit(size, 0)
            size.square_()
            for first in range(0, problem.shard_len, rows):
                place = places[first : first + rows]
                begin = max(0, int(place[0]) + 1 - problem.window) if problem.window else 0
                end = int(place[-1]) + 1 if problem.mask == "causal" else problem.seq_len
                queries = q[sequence, first : first + rows, of_group].transpose(0, 1).float() / math.sqrt(problem.head_dim)
                shape = *queries.shape[:2], end - begin
                # Views of the same memory: with a new size each time, torch would keep a block of each size that ever was.
                scores, shares = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                torch.mm(queries.flatten(0, 1), k[begin:end].t(), out=scores.view(-1, end - begin))
                if problem.mask == "causal":
                    seen = begin if problem.window else int(place[0])  # all of these queries see the keys before this one
                    before = place[:, None] - torch.arange(seen, end, device=q.device)
                    scores[..., seen - begin :].masked_fill_(before < 0, -math.inf)
                    if problem.window:
                        scores.masked_fill_(before >= problem.window, -math.inf)
                torch.softmax(scores, -1, out=shares)
                # The value of the first token may be NaN, and every query sees that token. No other value is.
                right[sequence, first : first + rows, of_group] = (shares @ v[begin:end]).transpose(0, 1)
                squares = (shares.square_() @ size[begin:end]).sqrt_() * most
                spread[sequence, first : first + rows, of_group] = squares.transpose(0, 1)
    return right, spread


FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Floating-point operations in a second, of 16 bits, by the data sheet. Other devices are unknown."""


@operator.bound(links="the links at full rate", arithmetic="both products, shared evenly, at the data sheet's rate")
def bound(problem: GatherAttention, hardware: Hardware, _: Rates) -> dict[str, float]:
    """The time for the rank that receives most to receive the keys and values that it sees, or if they are fewer all bytes of its
    share of the heads. And the time of the products, shared evenly: heads may be exchanged where tokens are not even.
    """
    token = problem.batch * problem.kv_heads * (problem.head_dim + problem.value_dim) * problem.item_size
    ranks, peers = range(problem.world_size), problem.world_size - 1
    tokens = max(
        sum(end - first for source in ranks if source != rank for first, end in problem.keys_sent(source, rank)) for rank in ranks
    )
    times = links_us(min(token * tokens, problem.nbytes * peers // problem.world_size), peers, hardware)
    if hardware.device in FLOPS:
        pairs = [problem.pairs(rank) for rank in ranks]
        times["arithmetic"] = problem.flops * statistics.mean(pairs) / max(pairs) / FLOPS[hardware.device] * 1e6
    return times


_KERNELS, _SPACES = "autotax.kernels.gather_attention", "autotax.spaces.gather_attention"

operator.variant("bsp", f"{_KERNELS}.vendor:Bsp", f"{_SPACES}:bsp", role="baseline")
operator.variant("decomposed", f"{_KERNELS}.vendor:Decomposed", f"{_SPACES}:decomposed")
operator.variant("ring", f"{_KERNELS}.ring:Ring", f"{_SPACES}:ring")
operator.variant("heads", f"{_KERNELS}.vendor:Heads", f"{_SPACES}:heads")
operator.variant("copy_engine", f"{_KERNELS}.push_specialized:CopyEngine", f"{_SPACES}:copy_engine")
operator.variant("push_specialized", f"{_KERNELS}.push_specialized:PushSpecialized", f"{_SPACES}:push_specialized")
operator.variant("push", f"{_KERNELS}.push:Push", f"{_SPACES}:push")


def _with_cudnn(problem: GatherAttention, hardware: Hardware) -> bool:
    """Whether torch has cuDNN's attention, which has no windows."""
    return hardware.backend == "cuda" and not problem.window


def _in_torch(problem: GatherAttention, hardware: Hardware) -> bool:
    """Whether torch's context parallelism serves a problem: without windows, with heads of one size."""
    return _with_cudnn(problem, hardware) and not problem.v_dim


operator.peer("torch_context_parallel", f"{_KERNELS}.peers:TorchContextParallel", where=_in_torch)
operator.peer("torch_context_parallel_ring", f"{_KERNELS}.peers:TorchContextParallelRing", where=_in_torch)
operator.peer(
    "attention", f"{_KERNELS}.peers:AttentionAlone", modes=(), part="the attention", row="attention alone", where=_with_cudnn
)
