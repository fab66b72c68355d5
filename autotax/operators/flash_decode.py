"""Distributed Flash Decode: attention of one query token per sequence over a KV cache that is sharded along the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from autotax.core.problem import Problem, ceil_div, choice, dtype, ranks, require_divided, require_grouped, size
from autotax.hardware import Hardware
from autotax.operators.declaration import Operator, Rates, Step

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.inputs import Call, Draw


KV_DTYPES = ("same", "e4m3", "e4m3fnuz")
"""Types of the cache. e4m3 is OCP's, which NVIDIA GPUs and gfx950 convert; gfx942 converts e4m3fnuz."""


_UNUSUAL = ("output", "page", "kv_dtype", "sinks", "window", "queries")


@dataclass(frozen=True)
class FlashDecode(Problem):
    """Attention of one query token per sequence over a KV cache sharded along the sequence.

    q [batch, q_heads, head_dim]; K and V [batch, kv_heads, S, head_dim] on each rank, S = ceil(kv_len / world_size);
    lengths int32 [batch]: number of valid tokens of each sequence on a rank, at most S (0 is allowed).
    `kv_len` is the greatest length over all ranks. Each KV head serves q_heads / kv_heads query heads.

    - `output="replicated"`: every rank gets the whole output [batch, q_heads, head_dim].
    - `output="head_scatter"`: rank r gets heads r*H ... r*H + H - 1, H = q_heads / world_size, as [batch, H, head_dim]. An output
      projection sharded by rows takes this as its input.

    With `page` tokens (16 or 64) the cache is paged as in serving engines. K and V on each rank are pools [pages, page, kv_heads,
    head_dim]. A block table int32 [batch, ceil(S / page)] lists the pages of a sequence, in the order of its tokens. Sequences
    may share pages; entries beyond a sequence's length are never read.

    - `kv_dtype` e4m3 or e4m3fnuz: K and V have 8 bits per element. A call has scales float32 [2, kv_heads], of K and then of V;
      an element is its value times the scale of its head. For one scale per tensor, all heads get the same number.
    - `sinks="learned"`: a call has one logit per query head, float32 [q_heads], the same on all ranks. It adds one term to the
      denominator of the softmax, counted once over all ranks.
    - `queries` > 1: the last `queries` tokens of each sequence are query tokens; K and V already contain them. q and the output
      are [batch, heads, queries, head_dim]. Lengths are [batch, queries]: the number of a rank's tokens that each query token
      sees.
    - `window` > 0: a query token sees at most `window` tokens: itself and those just before it. A call has starts, int32 in the
      shape of lengths: the first of a rank's tokens that each query token sees.

    Lengths and starts do not decrease from one query token to the next. A rank may hold any tokens of the sequence, as long as
    they are in order.
    """

    batch: int = size("sequences", most=65535, varying=True)
    q_heads: int = size("query heads", most=4096)
    kv_heads: int = size("KV heads", most=4096)
    head_dim: int = size("elements of a head", most=256)
    kv_len: int = size("greatest length over all ranks", varying=True)
    dtype: str = dtype()
    world_size: int = ranks()
    output: str = choice(
        "replicated, or head_scatter: each rank its own heads", ("replicated", "head_scatter"), default="replicated", unnamed=True
    )
    page: int = choice(
        "tokens of a page, 16 or 64; 0: a contiguous cache",
        (0, 16, 64),
        default=0,
        unnamed=True,
        spelled="0 (contiguous), 16, 64",
    )
    kv_dtype: str = choice(
        "element type of K and V: same (as dtype), or e4m3 or e4m3fnuz with scales", KV_DTYPES, default="same", unnamed=True
    )
    sinks: str = choice("none, or learned: a logit a head in the denominator", ("none", "learned"), default="none", unnamed=True)
    window: int = size("tokens that a query sees, the last ones; 0: all", least=0, default=0, unnamed=True)
    queries: int = size("query tokens of each sequence, its last ones", most=64, default=1, unnamed=True)

    op: ClassVar[str] = "flash-decode"

    def check(self) -> None:
        require_grouped(self)
        if self.output == "head_scatter":
            require_divided(self, "q_heads", scattered=True)

    @property
    def nbytes(self) -> int:
        tokens = self.pages * self.page or self.shard_len
        rows = self.batch * (self.q_heads + self.out_heads) * self.queries * self.item_size
        return (rows + 2 * self.batch * self.kv_heads * tokens * self.kv_item_size) * self.head_dim

    @property
    def kv_item_size(self) -> int:
        """Bytes of one element of K or V."""
        return self.item_size if self.kv_dtype == "same" else 1

    @cached_property
    def shard_len(self) -> int:
        """Capacity of one rank, in tokens of each sequence."""
        return ceil_div(self.kv_len, self.world_size)

    @cached_property
    def pages(self) -> int:
        """Pages per sequence on a rank, which is the number of columns of the block table; 0 where the cache is contiguous."""
        return ceil_div(self.shard_len, self.page) if self.page else 0

    @cached_property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """Shape of K or V on one rank, without unused pages."""
        if self.page:
            return self.batch * self.pages, self.page, self.kv_heads, self.head_dim
        return self.batch, self.kv_heads, self.shard_len, self.head_dim

    @cached_property
    def out_heads(self) -> int:
        """Number of query heads in a rank's output."""
        return self.q_heads if self.output == "replicated" else self.q_heads // self.world_size

    @cached_property
    def seen_len(self) -> int:
        """The most tokens of a sequence that a rank has to read, if each rank holds contiguous tokens and all ranks are full."""
        if not self.window:
            return self.shard_len
        first, per = max(0, self.kv_len - self.window - self.queries + 1), self.shard_len
        ends = (min(self.kv_len, (rank + 1) * per) for rank in range(self.world_size))
        return max(end - max(first, rank * per) for rank, end in enumerate(ends))

    @cached_property
    def rows(self) -> int:
        """Rows of attention: query heads of all query tokens of all sequences."""
        return self.batch * self.q_heads * self.queries

    @cached_property
    def out_rows(self) -> int:
        """Number of rows in a rank's output."""
        return self.batch * self.out_heads * self.queries

    @cached_property
    def group(self) -> int:
        """Rows of a sequence that share one KV head."""
        return self.q_per_kv * self.queries

    @cached_property
    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    def brief(self) -> str:
        """`B 1, 64/8 heads, KV 32K`"""
        length = f"{self.kv_len // 1024}K" if self.kv_len % 1024 == 0 else str(self.kv_len)
        text = self.with_unusual(f"B {self.batch}, {self.q_heads}/{self.kv_heads} heads, KV {length}", *_UNUSUAL)
        return self.with_unusual(text + (f", dim {self.head_dim}" if self.head_dim != 128 else ""), "dtype")


operator = Operator(FlashDecode)
operator.example(on_gpu=FlashDecode(1, 64, 8, 128, 32768), on_cpu=FlashDecode(2, 8, 2, 32, 128, "fp32"))


@operator.inputs
def draw(problem: FlashDecode, draw: Draw) -> Call:
    """q, equal on all ranks; K, V and lengths of one rank; the block table if the cache is paged -> o."""
    from autotax.operators.inputs import Call

    several = _several(problem)
    q = draw.normal(problem.batch, problem.q_heads, *several, problem.head_dim, tensor=3, shared=True)
    k, v = (draw.normal(*problem.cache_shape, tensor=tensor) for tensor in (4, 5))
    ends, starts = _seen(problem, draw)
    tables = [_table(problem, draw, starts, ends)] if problem.page else []
    eight_bits = problem.kv_dtype != "same"
    if draw.extreme:
        _spread(problem, draw, q, k, v)
        for head, channel, odd in ((0, 0, math.inf), (problem.kv_heads - 1, problem.head_dim // 2, math.nan)):
            _place(v, starts, ends, tables, head, (draw.seed + channel) % problem.head_dim, math.nan if eight_bits else odd)
    tensors = [ends, *tables, *([starts] if problem.window else [])]
    if eight_bits:
        k, v, scales = _quantized(problem, draw, q, k, v)
        tensors.append(scales)
    if problem.sinks == "learned":
        tensors.append(_sinks(problem, draw))
    shape = problem.batch, problem.out_heads, *several, problem.head_dim
    return Call((q, k, v, *(tensor.to(draw.device) for tensor in tensors)), draw.empty(*shape))


def _several(problem: FlashDecode) -> tuple[int, ...]:
    """The shape of the query-token dimension: empty for a single query token."""
    return (problem.queries,) if problem.queries > 1 else ()


def _seen(problem: FlashDecode, draw: Draw) -> tuple[Tensor, Tensor]:
    """The end (exclusive) and the start of the range of a rank's tokens that each query token sees: int32, [batch] or [batch,
    queries]. Each rank's tokens follow those of the rank before.
    """
    import torch

    everyones = torch.stack([_lengths(problem, draw.of(rank)) for rank in range(problem.world_size)])
    before, held, whole = everyones[: draw.rank].sum(0)[:, None], everyones[draw.rank][:, None], everyones.sum(0)[:, None]
    behind = whole - problem.queries + torch.arange(problem.queries) + 1  # the position after each query token
    ends = (behind - before).clamp_(min=0).minimum(held)
    starts = (behind - problem.window - before).clamp_(min=0).minimum(ends) if problem.window else torch.zeros_like(ends)
    shape = (problem.batch, problem.queries) if problem.queries > 1 else (problem.batch,)
    return ends.to(torch.int32).view(shape), starts.to(torch.int32).view(shape)


def _quantized(problem: FlashDecode, draw: Draw, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K and V in 8 bits, and their scales. In extreme draws scales are powers of two, and q takes the inverse of K's."""
    import torch

    from autotax.operators.inputs import EIGHT_BITS, SPREADS, powers, scale

    kind, heads = EIGHT_BITS[problem.kv_dtype], problem.kv_heads
    factor = 1.0
    if draw.extreme:
        keys = powers((heads,), SPREADS[problem.dtype].channel, draw.seed, 7)
        scales = torch.stack((keys, powers((heads,), SPREADS[problem.dtype].head, draw.seed, 8)))
        scale(q, _of_heads(problem, 1 / keys[:, None]))
    else:
        factor = 32.0  # normal numbers then use most of the type's range, up to 448 or 240
        scales = (torch.rand(2, heads, generator=torch.Generator().manual_seed(draw.seed)) + 0.5) / factor
    if draw.device.type == "meta":
        return k.to(kind), v.to(kind), scales
    most = torch.finfo(kind).max
    k, v = ((tensor.float() * factor).clamp_(-most, most).to(kind) for tensor in (k, v))
    return k, v, scales


def _sinks(problem: FlashDecode, draw: Draw) -> Tensor:
    """Logits about as large as the log-sum-exp of all scores. In extreme draws one is -inf and one is very large."""
    import torch

    sinks = torch.randn(problem.q_heads, generator=torch.Generator().manual_seed(draw.seed + 11))
    sinks += math.log(problem.window or problem.kv_len)
    if draw.extreme:
        sinks[0], sinks[-1] = -math.inf, 20.0
    return sinks


def _of_heads(problem: FlashDecode, factors: Tensor) -> Tensor:
    """Repeats factors of KV heads [kv_heads, ...] for the query heads, in a shape that multiplies q."""
    factors = factors.repeat_interleave(problem.q_per_kv, 0)
    return factors if problem.queries == 1 else factors[:, None]


def _spread(problem: FlashDecode, draw: Draw, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Scales channels of K, channels of q by the inverse, and heads and channels of V."""
    from autotax.operators.inputs import SPREADS, powers, scale

    reach, seed = SPREADS[problem.dtype if problem.kv_dtype == "same" else "8 bits"], draw.seed
    keys = powers((problem.kv_heads, problem.head_dim), reach.channel, seed, 4)
    values = powers((problem.kv_heads,), reach.head, seed, 5)[:, None]
    values = values * powers((problem.kv_heads, problem.head_dim), reach.value, seed, 6)
    scale(q, _of_heads(problem, 1 / keys))
    for tensor, factors in ((k, keys), (v, values)):
        scale(tensor, factors if problem.page else factors[:, None, :])


def _place(v: Tensor, starts: Tensor, ends: Tensor, tables: list[Tensor], head: int, channel: int, odd: float) -> None:
    """Stores `odd` in a channel of a token that all query tokens of a sequence see, if there is such a token."""
    batch = len(starts)
    firsts, behind = starts.view(batch, -1)[:, -1], ends.view(batch, -1)[:, 0]
    some = (firsts < behind).nonzero()
    if len(some):
        sequence = int(some[channel % len(some), 0])
        token = int(firsts[sequence])
        page = v.shape[1]
        place = (int(tables[0][sequence, token // page]), token % page, head) if tables else (sequence, head, token)
        v[(*place, channel)] = odd


def _lengths(problem: FlashDecode, draw: Draw) -> Tensor:
    """Valid tokens of each sequence on a rank, int32 [batch]: full shards, or ragged ones of which some are empty."""
    import torch

    full = max(0, min(problem.shard_len, problem.kv_len - draw.rank * problem.shard_len))
    lengths = torch.full((problem.batch,), full, dtype=torch.int32)
    if draw.ragged:
        generator = draw.generator(1)
        lengths = torch.randint(0, full + 1, (problem.batch,), generator=generator, dtype=torch.int32)
        lengths[torch.rand(problem.batch, generator=generator) < 0.1] = 0
        lengths[torch.rand(problem.batch, generator=generator) < 0.1] = min(1, full)
        if draw.rank == draw.seed // 2 % 2:
            lengths[0] = full  # else a batch of one might be empty on all ranks, and any kernel would pass
    return lengths


def _table(problem: FlashDecode, draw: Draw, starts: Tensor, ends: Tensor) -> Tensor:
    """All pages in random order, int32 [batch, pages]; entries of pages without visible tokens are invalid page numbers."""
    import torch

    table = torch.randperm(problem.batch * problem.pages, generator=draw.generator(2)).to(torch.int32).view(problem.batch, -1)
    first, behind = starts.view(problem.batch, -1)[:, :1], ends.view(problem.batch, -1)[:, -1:]
    tokens = torch.arange(problem.pages) * problem.page
    return table.masked_fill_((tokens >= behind) | (tokens + problem.page <= first), 2**31 - 1)


@operator.reference
def reference(problem: FlashDecode, calls: Sequence[Call], rank: int) -> tuple[Tensor, Tensor]:
    """Softmax attention in float32, shard by shard, merged by the shards' log-sum-exps; and its spread."""
    import torch

    from autotax.operators.verification import together, unit

    batch, heads, group, dim = problem.batch, problem.kv_heads, problem.group, problem.head_dim
    outs, spreads, sums = [], [], []
    everyones = [call.tensors[3] for call in calls] if problem.window or problem.queries > 1 else []
    for source, call in enumerate(calls):
        q, k, v, ends, *more = call.tensors
        if problem.page:
            k, v = (_contiguous(pool, more[0]) for pool in (k, v))
        k, v = k.float(), v.float()
        if problem.kv_dtype != "same":
            scales = more[(problem.page > 0) + (problem.window > 0)][..., None, None]
            k, v = k * scales[0], v * scales[1]
        scores = q.float().view(batch, heads, group, dim) @ k.transpose(-1, -2) / math.sqrt(dim)
        visible = _visible(problem, ends, everyones, source, k.shape[2])  # [batch, queries, tokens]
        by_row = visible[:, None, None].expand(-1, heads, problem.q_per_kv, -1, -1).reshape(scores.shape)
        scores.masked_fill_(~by_row, -math.inf)
        sums.append(torch.logsumexp(scores, dim=-1))
        shares = torch.softmax(scores, dim=-1).nan_to_num_(0.0)
        v = v.masked_fill_(~visible.any(1)[:, None, :, None], 0.0)
        outs.append(shares @ v)
        most = unit(v, 2)
        spreads.append((shares.square_() @ v.square_()).sqrt_() * most)
    if problem.sinks == "learned":  # a sink acts as one more token, whose value is zero
        sinks = more[-1].view(heads, problem.q_per_kv, 1).expand(-1, -1, problem.queries)
        sums.append(sinks.reshape(heads, group).expand(batch, -1, -1))
    weights = torch.softmax(torch.stack(sums), dim=0).nan_to_num(0.0)[: len(outs), ..., None]
    whole = (weights * torch.stack(outs)).sum(0)
    spread = together(list(weights * torch.stack(spreads)))
    first = rank * problem.out_heads if problem.output == "head_scatter" else 0
    own = slice(first, first + problem.out_heads)
    right, spread = (part.view(batch, problem.q_heads, *_several(problem), dim)[:, own].contiguous() for part in (whole, spread))
    return right, spread


def _visible(problem: FlashDecode, ends: Tensor, everyones: list[Tensor], rank: int, tokens: int) -> Tensor:
    """Mask of the rank's tokens that each query token sees, bool [batch, queries, tokens]. Usually these are the tokens before
    `ends`. With several query tokens or a window, positions in the sequence decide. `everyones` holds the ends of all ranks,
    which give these positions. The end of the last query token is the end of the tokens.
    """
    import torch

    token = torch.arange(tokens, device=ends.device)
    if not everyones:
        return (token < ends[:, None])[:, None]
    held = torch.stack([lengths.view(problem.batch, -1)[:, -1] for lengths in everyones])
    place = (held[:rank].sum(0)[:, None] + token)[:, None, :]
    query = (held.sum(0)[:, None] - problem.queries + torch.arange(problem.queries, device=token.device))[..., None]
    seen = (token < held[rank][:, None])[:, None, :] & (place <= query)
    return seen & (place > query - problem.window) if problem.window else seen


def _contiguous(pool: Tensor, table: Tensor) -> Tensor:
    """The pages [pages, page, kv_heads, head_dim] of each sequence as [batch, kv_heads, tokens, head_dim], invalid ones too."""
    batch, pages = table.shape
    mine = pool[table.masked_fill(table >= len(pool), 0).long()]  # [batch, pages, page, kv_heads, head_dim]
    return mine.permute(0, 3, 1, 2, 4).reshape(batch, pool.shape[2], pages * pool.shape[1], pool.shape[3])


@operator.bound(memory="the cache read once, as fast as a copy moves bytes here")
def bound(problem: FlashDecode, hardware: Hardware, rates: Rates) -> dict[str, float]:
    """The time to read what a rank's query tokens see once, at the copy rate of the same run; empty on CPU ranks."""
    copy_gbps = rates.get("copy_gbps")
    if not copy_gbps or not hardware.on_gpu:
        return {}
    tokens = 2 * problem.batch * problem.kv_heads * problem.seen_len
    return {"memory": tokens * problem.head_dim * problem.kv_item_size / (min(copy_gbps) * 1e3)}


_KERNELS, _SPACES = "autotax.kernels.flash_decode", "autotax.spaces.flash_decode"
operator.traits = _SPACES
_ROUNDS = Step("rounds", "programs that do not all run at once, as those of resident and compact do")

operator.variant("bsp", f"{_KERNELS}.bsp:Bsp", f"{_SPACES}:bsp", role="baseline")
operator.variant(
    "gather", f"{_KERNELS}.bsp:Gather", f"{_SPACES}:gather", role="ladder",
    step=Step("library", "the collective of the library in place of a kernel that pushes"),
)  # fmt: skip
operator.variant(
    "fine_grained", f"{_KERNELS}.bsp:FineGrained", f"{_SPACES}:fine_grained", role="ladder",
    step=Step("bulk-synchronous", "a merge that waits for all ranks at once, not for each"),
)  # fmt: skip
operator.variant(
    "fused", f"{_KERNELS}.fused:Fused", f"{_SPACES}:fused",
    step=Step("locality", "results of the local merge that go through memory to a kernel that sends them"),
)  # fmt: skip
operator.variant(
    "single", f"{_KERNELS}.fused:Single", f"{_SPACES}:single",
    step=Step("kernels", "three kernels in place of one"),
)  # fmt: skip
operator.variant("resident", f"{_KERNELS}.resident:Resident", f"{_SPACES}:resident", step=_ROUNDS)
operator.variant("compact", f"{_KERNELS}.compact:Compact", f"{_SPACES}:compact", step=_ROUNDS)
