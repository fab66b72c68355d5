"""Layers in the style of Llama, tensor-parallel, in two editions of the same weights: on autotax.nn, and on NCCL and torch.mm.

A layer is RMSNorm, QKV, attention, output projection, RMSNorm, gate and up, SiLU, down. The residual stream is spread by rows
over the ranks (sequence parallel) where the ranks divide the rows: then QKV, gate and up gather rows while or before they
multiply, and the row-parallel projections reduce-scatter. Fewer rows are on every rank, projected without a gather, and
all-reduced. Both editions differ in what gathers rows, in what adds up products and in what attends to the KV cache, in nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from autotax.core.config import Config
from autotax.heap import World
from autotax.nn import AllGatherLinear, FlashDecode, LinearAllReduce, LinearReduceScatter

Cache = tuple[Tensor, Tensor, Tensor]
"""K, V [batch, kv_heads, tokens, head_dim] and int32 lengths [batch] of this rank."""

# torch 2.13 renamed them and warns of the old names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Sizes:
    """Of the whole model; the ranks share heads and the columns of the MLP evenly."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    kv_len: int
    world_size: int

    @property
    def q_columns(self) -> int:
        """Columns of Q on each rank."""
        return self.q_heads // self.world_size * self.head_dim

    @property
    def kv_columns(self) -> int:
        return self.kv_heads // self.world_size * self.head_dim

    @property
    def qkv_columns(self) -> int:
        return self.q_columns + 2 * self.kv_columns

    @property
    def ffn_columns(self) -> int:
        """Columns of the gate on each rank, and as many of up."""
        return self.ffn // self.world_size

    def spread(self, rows: int) -> bool:
        """Whether so many rows are spread over the ranks."""
        return rows % self.world_size == 0


@dataclass(frozen=True)
class Weights:
    """One rank's part of a layer, [columns, inner] as in torch.nn.Linear. `gate_up` holds the gate's columns, then up's."""

    qkv: nn.Parameter
    o: nn.Parameter
    gate_up: nn.Parameter
    down: nn.Parameter

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter((self.qkv, self.o, self.gate_up, self.down))

    @classmethod
    def draw(cls, sizes: Sizes, world: World, dtype: torch.dtype, seed: int) -> Weights:
        generator = torch.Generator(world.device).manual_seed(1000 * seed + world.rank)

        def normal(columns: int, inner: int) -> nn.Parameter:
            drawn = torch.randn(columns, inner, generator=generator, device=world.device, dtype=torch.float32)
            return nn.Parameter((drawn / inner**0.5).to(dtype))

        return cls(
            normal(sizes.qkv_columns, sizes.hidden),
            normal(sizes.hidden, sizes.q_columns),
            normal(2 * sizes.ffn_columns, sizes.hidden),
            normal(sizes.hidden, sizes.ffn_columns),
        )


class GatherRows(torch.autograd.Function):
    """The rows of all ranks; the gradient is scattered and summed, as a training program on NCCL does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor | None) -> Tensor:  # noqa: ARG004
        """`whole`: where they go. Without it they are kept for the backward."""
        count = len(x) * dist.get_world_size()
        rows = x.new_empty(count, x.shape[1]) if whole is None else whole[:count]
        all_gather(rows, x)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return _own_rows(grads[0].contiguous()), None


class ScatterSum(torch.autograd.Function):
    """The own rows of the sum over the ranks; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:  # noqa: ARG004
        return _own_rows(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        whole = grads[0].new_empty(len(grads[0]) * dist.get_world_size(), grads[0].shape[1])
        all_gather(whole, grads[0].contiguous())
        return whole


def _own_rows(partial: Tensor) -> Tensor:
    own = partial.new_empty(len(partial) // dist.get_world_size(), partial.shape[1])
    reduce_scatter(own, partial)
    return own


class NcclLinear(nn.Module):
    """The baseline of AllGatherLinear: the collective library's all-gather, then torch.mm. When it trains it keeps the rows."""

    def __init__(self, weight: Tensor, gathered: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.gathered = gathered

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(GatherRows.apply(x, None if torch.is_grad_enabled() else self.gathered), self.weight.t())


class NcclRows(nn.Module):
    """The baseline of the row-parallel layers: torch.mm, then the collective library's sum."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, residual: Tensor, spread: bool) -> Tensor:
        partial = torch.mm(x, self.weight.t())
        if spread:
            return residual + ScatterSum.apply(partial)
        dist.all_reduce(partial)
        return residual + partial


class TunedRows(nn.Module):
    """LinearReduceScatter where rows are spread, LinearAllReduce elsewhere."""

    def __init__(self, scatter: LinearReduceScatter | None, reduce: LinearAllReduce | None) -> None:
        super().__init__()
        self.scatter, self.reduce = scatter, reduce

    def forward(self, x: Tensor, residual: Tensor, spread: bool) -> Tensor:
        layer = self.scatter if spread else self.reduce
        assert layer is not None
        y: Tensor = layer(x, residual=residual)
        return y


class Layer(nn.Module):
    def __init__(
        self, sizes: Sizes, weights: Weights, qkv: nn.Module, gate_up: Sequence[nn.Module], rows: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.sizes = sizes
        place = {"device": weights.o.device, "dtype": weights.o.dtype}
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden, eps=1e-5, **place).requires_grad_(False) for _ in range(2))
        self.weights = weights
        self.qkv = qkv
        self.gate_up = nn.ModuleList(gate_up)
        self.o, self.down = rows

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor], spread: bool) -> Tensor:
        """x [rows, hidden], this rank's rows if `spread`; `attend` makes [M, q_columns] of [M, qkv_columns]."""
        w = self.weights
        h = self.norms[0](x)
        qkv = self.qkv(h) if spread else torch.mm(h, w.qkv.t())
        x = self.o(attend(qkv), x, spread)
        h = self.norms[1](x)
        parts = [linear(h) for linear in self.gate_up] if spread else [torch.mm(h, w.gate_up.t())]
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
        return self.down(silu(gate) * up, x, spread)


class Stack(nn.Module):
    """All layers of one edition; `decoders` attend to the KV cache, one for each batch."""

    def __init__(self, sizes: Sizes, layers: Sequence[Layer], decoders: dict[int, FlashDecode]) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(layers)
        self.decoders = nn.ModuleDict({str(batch): decoder for batch, decoder in decoders.items()})

    def prefill(self, x: Tensor) -> Tensor:
        """One sequence: x [rows, hidden], this rank's rows of it."""
        for layer in self.layers:
            x = layer(x, lambda qkv: own_heads_attend(qkv, self.sizes), True)
        return x

    def decode(self, x: Tensor, caches: Sequence[Cache]) -> Tensor:
        """One token of each sequence: x [rows, hidden]; `caches` as they are, without the new token's K and V."""
        batch = len(caches[0][2])
        decoder = self.decoders[str(batch)]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, lambda qkv, cache=cache: all_heads_attend(qkv, self.sizes, decoder, cache), self.sizes.spread(batch))
        return x


def own_heads_attend(qkv: Tensor, sizes: Sizes) -> Tensor:
    """Causal attention of this rank's heads among all tokens."""
    columns = [sizes.q_columns, sizes.kv_columns, sizes.kv_columns]
    q, k, v = (part.view(1, len(qkv), -1, sizes.head_dim).transpose(1, 2) for part in qkv.split(columns, dim=-1))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2).reshape(len(qkv), -1)


def all_heads_attend(qkv: Tensor, sizes: Sizes, decoder: FlashDecode, cache: Cache) -> Tensor:
    """Every rank attends with the queries of all heads to its tokens; returns this rank's heads of the merged result."""
    own = qkv[:, : sizes.q_columns].contiguous()
    gathered = own.new_empty(sizes.world_size * len(own), sizes.q_columns)
    all_gather(gathered, own)
    q = gathered.view(sizes.world_size, len(own), -1, sizes.head_dim).transpose(0, 1).reshape(len(own), -1, sizes.head_dim)
    o = decoder(q, *cache).view(len(own), -1)
    return o[:, dist.get_rank() * sizes.q_columns :][:, : sizes.q_columns].contiguous()


def nccl_stack(sizes: Sizes, world: World, weights: Sequence[Weights], rows: Sequence[int], bsp: dict[int, Config]) -> Stack:
    """Gathers once for gate and up; attends to the cache with autotax's own bulk-synchronous kernels, of config `bsp[batch]`."""
    dtype = weights[0].qkv.dtype
    gathered = torch.empty(max(rows, default=0), sizes.hidden, dtype=dtype, device=world.device)
    layers = [
        Layer(
            sizes, w, NcclLinear(w.qkv, gathered), [NcclLinear(w.gate_up, gathered)], [NcclRows(w.o), NcclRows(w.down)]
        )
        for w in weights
    ]  # fmt: skip
    return Stack(sizes, layers, {batch: decoder(sizes, batch, world, dtype, config=config) for batch, config in bsp.items()})


def tuned_stack(
    sizes: Sizes,
    world: World,
    weights: Sequence[Weights],
    rows: Sequence[int],
    batches: Sequence[int],
    db: str | None,
    halves: bool,
    row_parallel: bool,
    keep_gathered: bool = True,
) -> Stack:
    """On autotax.nn, with what the database says. `halves`: gate and up are two layers, each of which gathers.
    `row_parallel`: the output and down projections are layers of autotax too. `rows` are spread over the ranks, some batches not.
    """
    made: dict[Any, Any] = {}
    few = [batch for batch in batches if not sizes.spread(batch)]

    def layer(kind: Any, weight: Tensor, counts: Sequence[int], **more: Any) -> Any:
        first = made.get((kind, weight.shape))
        if first is not None:
            return kind(weight, like=first, **more)
        return made.setdefault((kind, weight.shape), kind(weight, None, max(counts), db=db, sizes=list(counts), **more))

    def linear(weight: Tensor) -> AllGatherLinear:
        counts = rows or [sizes.world_size]
        return layer(AllGatherLinear, weight, counts, keep_gathered=keep_gathered)  # type: ignore[no-any-return]

    def rows_of(weight: Tensor) -> nn.Module:
        if not row_parallel:
            return NcclRows(weight)
        scatter = layer(LinearReduceScatter, weight, rows) if rows else None
        return TunedRows(scatter, layer(LinearAllReduce, weight, few) if few else None)

    parts = 2 if halves else 1
    layers = []
    for w in weights:
        gate_up = [linear(part) for part in (w.gate_up.chunk(parts) if halves else [w.gate_up])]
        layers.append(Layer(sizes, w, linear(w.qkv), gate_up, [rows_of(w.o), rows_of(w.down)]))
    dtype = weights[0].qkv.dtype
    return Stack(sizes, layers, {batch: decoder(sizes, batch, world, dtype, db=db) for batch in batches})


def decoder(
    sizes: Sizes, batch: int, world: World, dtype: torch.dtype, db: str | None = None, config: Config | None = None
) -> FlashDecode:
    where = {"dtype": dtype, "device": world.device, "sizes": None if config else [batch]}
    return FlashDecode(sizes.kv_heads, sizes.q_heads, sizes.head_dim, batch, sizes.kv_len, db=db, config=config, **where)


def draw_cache(sizes: Sizes, world: World, batch: int, dtype: torch.dtype, seed: int) -> Cache:
    """A full cache: this rank's share of `kv_len` tokens of each sequence.

    The values have a mean of their own on each rank and in each element: of those around zero the mean over many tokens is next
    to nothing, and attention that is wrong would not show in what the layers make of it.
    """
    tokens = -(-sizes.kv_len // sizes.world_size)
    generator = torch.Generator(world.device).manual_seed(7000 * seed + world.rank)
    shape = (batch, sizes.kv_heads, tokens, sizes.head_dim)
    k, v = (torch.randn(shape, generator=generator, device=world.device, dtype=torch.float32) for _ in range(2))
    v += torch.randn(batch, sizes.kv_heads, 1, sizes.head_dim, generator=generator, device=world.device, dtype=torch.float32)
    held = max(0, min(tokens, sizes.kv_len - world.rank * tokens))
    return k.to(dtype), v.to(dtype), torch.full((batch,), held, dtype=torch.int32, device=world.device)
