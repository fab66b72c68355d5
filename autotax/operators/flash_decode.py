"""Distributed Flash Decode: attention of one query token per sequence over a KV cache that is sharded along the sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autotax.errors import UsageError
from autotax.operators.declaration import Operator, Rates, Step
from autotax.problem import Problem, ceil_div, choice, dtype, ranks, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from autotax.hardware import Hardware
    from autotax.operators.draw import Call, Draw


@dataclass(frozen=True)
class FlashDecode(Problem):
    """Attention of one query token per sequence over a KV cache sharded along the sequence.

    q [batch, q_heads, head_dim]; K and V [batch, kv_heads, S, head_dim] on each rank, S = ceil(kv_len / world_size);
    lengths int32 [batch]: how many of its S tokens a rank really holds of each sequence (0 is allowed).
    `kv_len` is the greatest length over all ranks. Each KV head serves q_heads / kv_heads query heads.

    - `output="replicated"`: every rank gets the whole output [batch, q_heads, head_dim].
    - `output="head_scatter"`: rank r gets heads r*H ... r*H + H - 1, H = q_heads / world_size, as [batch, H, head_dim]: what
      an output projection that is sharded by rows takes.

    With `page` tokens (16 or 64) the cache is paged as serving engines hold it. K and V on each rank are pools
    [pages, page, kv_heads, head_dim]. A block table int32 [batch, ceil(S / page)] says which pages a sequence has, in the
    order of its tokens. Sequences may share pages; entries beyond a sequence's length are never read.
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

    op: ClassVar[str] = "flash-decode"

    def check(self) -> None:
        """See Problem.check."""
        if self.q_heads % self.kv_heads:
            raise UsageError(
                f"q_heads is {self.q_heads} and kv_heads {self.kv_heads}; q_heads must be a multiple of kv_heads: "
                "give another --q-heads or --kv-heads"
            )
        if self.output == "head_scatter" and self.q_heads % self.world_size:
            raise UsageError(
                f"q_heads is {self.q_heads} on {self.world_size} ranks; with --output head_scatter it must be a multiple of the "
                "world size: give another --q-heads or --world-size, or --output replicated"
            )

    @property
    def nbytes(self) -> int:
        """See Problem.nbytes."""
        tokens = self.pages * self.page or self.shard_len
        rows = self.batch * (self.q_heads + self.out_heads + 2 * self.kv_heads * tokens)
        return rows * self.head_dim * self.item_size

    @property
    def shard_len(self) -> int:
        """Tokens of each sequence that one rank has room for."""
        return ceil_div(self.kv_len, self.world_size)

    @property
    def pages(self) -> int:
        """Pages that a rank has for each sequence: the columns of the block table; 0 where the cache is contiguous."""
        return ceil_div(self.shard_len, self.page) if self.page else 0

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """K or V on one rank, without pages that no sequence has."""
        if self.page:
            return self.batch * self.pages, self.page, self.kv_heads, self.head_dim
        return self.batch, self.kv_heads, self.shard_len, self.head_dim

    @property
    def out_heads(self) -> int:
        """Query heads of which a rank gets the output."""
        return self.q_heads if self.output == "replicated" else self.q_heads // self.world_size

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    def brief(self) -> str:
        """`B 1, 64/8 heads, KV 32K`"""
        length = f"{self.kv_len // 1024}K" if self.kv_len % 1024 == 0 else str(self.kv_len)
        values = self.to_dict()
        unusual: dict[str, object] = {name: values[name] for name in ("output", "page") if name in values}  # there if unusual
        unusual |= {"dim": self.head_dim} if self.head_dim != 128 else {}
        unusual |= {"dtype": self.dtype} if self.dtype != "bf16" else {}
        told = f"B {self.batch}, {self.q_heads}/{self.kv_heads} heads, KV {length}"
        return told + "".join(f", {name} {value}" for name, value in unusual.items())


operator = Operator(FlashDecode)
operator.example(on_gpu=FlashDecode(1, 64, 8, 128, 32768), on_cpu=FlashDecode(2, 8, 2, 32, 128, "fp32"))


@operator.inputs
def draw(problem: FlashDecode, draw: Draw) -> Call:
    """q, which all ranks share, K, V and the lengths of one rank; of a paged cache the block table too -> o."""
    from autotax.operators.draw import Call

    q = draw.normal(problem.batch, problem.q_heads, problem.head_dim, tensor=3, shared=True)
    k, v = (draw.normal(*problem.cache_shape, tensor=tensor) for tensor in (4, 5))
    lengths = _lengths(problem, draw)
    tables = [_table(problem, draw, lengths)] if problem.page else []
    if draw.extreme:
        _spread(problem, draw, q, k, v)
        for head, channel, odd in ((0, 0, math.inf), (problem.kv_heads - 1, problem.head_dim // 2, math.nan)):
            _place(v, lengths, tables, head, (draw.seed + channel) % problem.head_dim, odd)
    there = (tensor.to(draw.device) for tensor in (lengths, *tables))
    return Call((q, k, v, *there), draw.empty(problem.batch, problem.out_heads, problem.head_dim))


def _spread(problem: FlashDecode, draw: Draw, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Scales channels of K, inversely those of q, and heads and channels of V."""
    from autotax.operators.extremes import SPREADS, powers, scale

    reach, seed = SPREADS[problem.dtype], draw.seed
    keys = powers((problem.kv_heads, problem.head_dim), reach.channel, seed, 4)
    values = powers((problem.kv_heads,), reach.head, seed, 5)[:, None]
    values = values * powers((problem.kv_heads, problem.head_dim), reach.value, seed, 6)
    scale(q, 1 / keys.repeat_interleave(problem.group, 0))
    for tensor, factors in ((k, keys), (v, values)):
        scale(tensor, factors if problem.page else factors[:, None, :])


def _place(v: Tensor, lengths: Tensor, tables: list[Tensor], head: int, channel: int, odd: float) -> None:
    """Puts a number into a channel of the first token of a sequence that has one."""
    some = lengths.nonzero()
    if len(some):
        sequence = int(some[channel % len(some), 0])
        place = (int(tables[0][sequence, 0]), 0, head) if tables else (sequence, head, 0)
        v[(*place, channel)] = odd


def _lengths(problem: FlashDecode, draw: Draw) -> Tensor:
    """Tokens that a rank really holds of each sequence, int32 [batch]: all there are, or ragged with some empty."""
    import torch

    full = max(0, min(problem.shard_len, problem.kv_len - draw.rank * problem.shard_len))
    lengths = torch.full((problem.batch,), full, dtype=torch.int32)
    if draw.ragged:
        generator = draw.generator(1)
        lengths = torch.randint(0, full + 1, (problem.batch,), generator=generator, dtype=torch.int32)
        lengths[torch.rand(problem.batch, generator=generator) < 0.1] = 0
        lengths[torch.rand(problem.batch, generator=generator) < 0.1] = min(1, full)
        if draw.rank == draw.seed // 2 % 2:
            lengths[0] = full  # else a batch of one might be empty on all ranks, and any kernel right
    return lengths


def _table(problem: FlashDecode, draw: Draw, lengths: Tensor) -> Tensor:
    """All pages in random order, int32 [batch, pages]; beyond a sequence's length numbers of no page."""
    import torch

    table = torch.randperm(problem.batch * problem.pages, generator=draw.generator(2)).to(torch.int32).view(problem.batch, -1)
    beyond = torch.arange(problem.pages) * problem.page >= lengths[:, None]
    return table.masked_fill_(beyond, 2**31 - 1)


@operator.reference
def reference(problem: FlashDecode, calls: Sequence[Call], rank: int) -> tuple[Tensor, Tensor]:
    """Softmax attention in float32, one rank's shard at a time, the shards weighed by their log-sum-exp; and its spread."""
    import torch

    from autotax.operators.expected import together, unit

    batch, heads, group, dim = problem.batch, problem.kv_heads, problem.group, problem.head_dim
    outs, spreads, sums = [], [], []
    for call in calls:
        q, k, v, lengths, *table = call.tensors
        if table:
            k, v = (_contiguous(pool, lengths, *table) for pool in (k, v))
        scores = q.float().view(batch, heads, group, dim) @ k.float().transpose(-1, -2) / math.sqrt(dim)
        there = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None, None, :]
        scores.masked_fill_(~there, -math.inf)
        sums.append(torch.logsumexp(scores, dim=-1))
        shares = torch.softmax(scores, dim=-1).nan_to_num_(0.0)
        v = v.float().masked_fill_(~there.transpose(-1, -2), 0.0)
        outs.append(shares @ v)
        most = unit(v, 2)
        spreads.append((shares.square_() @ v.square_()).sqrt_() * most)
    weights = torch.softmax(torch.stack(sums), dim=0).nan_to_num(0.0)[..., None]
    whole = (weights * torch.stack(outs)).sum(0)
    spread = together(list(weights * torch.stack(spreads)))
    first = rank * problem.out_heads if problem.output == "head_scatter" else 0
    own = slice(first, first + problem.out_heads)
    right, spread = (each.view(batch, problem.q_heads, dim)[:, own].contiguous() for each in (whole, spread))
    return right, spread


def _contiguous(pool: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """The pages of each sequence [pages, page, kv_heads, head_dim] as [batch, kv_heads, tokens, head_dim]."""
    import torch

    batch, pages = table.shape
    beyond = torch.arange(pages, device=pool.device) * pool.shape[1] >= lengths[:, None]
    mine = pool[table.masked_fill(beyond, 0).long()]  # [batch, pages, page, kv_heads, head_dim]
    return mine.permute(0, 3, 1, 2, 4).reshape(batch, pool.shape[2], pages * pool.shape[1], pool.shape[3])


@operator.bound(memory="the cache read once, as fast as a copy moves bytes here")
def bound(problem: FlashDecode, hardware: Hardware, rates: Rates) -> dict[str, float]:
    """The time to read a rank's keys and values once, at the rate of a copy in the same run; nothing on CPU ranks."""
    copy_gbps = rates.get("copy_gbps")
    if not copy_gbps or not hardware.on_gpu:
        return {}
    tokens = 2 * problem.batch * problem.kv_heads * problem.shard_len
    return {"memory": tokens * problem.head_dim * problem.item_size / (min(copy_gbps) * 1e3)}


_KERNELS, _SPACES = "autotax.kernels.flash_decode", "autotax.spaces.flash_decode"
operator.traits = f"{_SPACES}.traits"
_ROUNDS = Step("rounds", "programs that do not all run at once, as those of resident and compact do")

operator.variant("bsp", f"{_KERNELS}.bsp:Bsp", f"{_SPACES}.bsp:space", role="baseline")
operator.variant(
    "gather", f"{_KERNELS}.gather:Gather", f"{_SPACES}.gather:space", role="ladder",
    step=Step("library", "the collective of the library in place of a kernel that pushes"),
)  # fmt: skip
operator.variant(
    "fine_grained", f"{_KERNELS}.fine_grained:FineGrained", f"{_SPACES}.fine_grained:space", role="ladder",
    step=Step("bulk-synchronous", "a merge that waits for all ranks at once, not for each"),
)  # fmt: skip
operator.variant(
    "fused", f"{_KERNELS}.fused:Fused", f"{_SPACES}.fused:space",
    step=Step("locality", "results of the local merge that go through memory to a kernel that sends them"),
)  # fmt: skip
operator.variant(
    "single", f"{_KERNELS}.single:Single", f"{_SPACES}.single:space",
    step=Step("kernels", "three kernels in place of one"),
)  # fmt: skip
operator.variant("resident", f"{_KERNELS}.resident:Resident", f"{_SPACES}.resident:space", step=_ROUNDS)
operator.variant("compact", f"{_KERNELS}.compact:Compact", f"{_SPACES}.compact:space", step=_ROUNDS)
