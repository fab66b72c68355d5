"""Inputs drawn from a seed, and what the operator must make of them, in float32 and without any communication.

Every rank can draw every rank's inputs, so the reference needs no collective that could itself be wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autotax.kernels.context import DTYPES
from autotax.problem import AllGatherGemm, FlashDecode, Problem

TOLERANCE = {"bf16": 5e-3, "fp16": 2e-3, "fp32": 1e-5}
"""Greatest relative error ||out - reference|| / ||reference|| that counts as right."""


@dataclass(frozen=True)
class Inputs:
    """What one call takes on one rank: the operator's inputs, and the output it writes."""

    tensors: tuple[Tensor, ...]
    out: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.tensors, self.out))

    def poison(self) -> None:
        """Fills the output with NaN, so that an element nobody writes is noticed."""
        self.out.fill_(math.nan)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *seed: int) -> Tensor:
    generator = torch.Generator(device)
    # One stream of numbers for each (seed, tensor, rank): a small injective mixing is enough.
    generator.manual_seed(sum(part * 1_000_003**i for i, part in enumerate(seed)) % 2**63)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _lengths(problem: FlashDecode, seed: int, rank: int) -> Tensor:
    """Tokens that `rank` holds of each sequence, int32 [batch]. Even seeds: all there are. Odd ones: ragged, some empty."""
    full = max(0, min(problem.shard_len, problem.kv_len - rank * problem.shard_len))
    lengths = torch.full((problem.batch,), full, dtype=torch.int32)
    if seed % 2:
        generator = torch.Generator().manual_seed(seed * 131 + rank)
        lengths = torch.randint(0, full + 1, (problem.batch,), generator=generator, dtype=torch.int32)
        lengths[torch.rand(problem.batch, generator=generator) < 0.1] = 0
        lengths[torch.rand(problem.batch, generator=generator) < 0.1] = min(1, full)
    return lengths


def _draw_a(problem: AllGatherGemm, seed: int, rank: int, device: torch.device) -> Tensor:
    return _normal((problem.shard_rows, problem.shard_cols), DTYPES[problem.dtype], device, seed, 1, rank)


def _draw_b(problem: AllGatherGemm, seed: int, rank: int, device: torch.device) -> Tensor:
    return _normal((problem.n, problem.k), DTYPES[problem.dtype], device, seed, 2, rank)


def _draw_query(problem: FlashDecode, seed: int, device: torch.device) -> Tensor:
    return _normal((problem.batch, problem.q_heads, problem.head_dim), DTYPES[problem.dtype], device, seed, 3)


def _draw_cache(problem: FlashDecode, seed: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    """K, V and the lengths of one rank; of a paged cache the block table too."""
    k, v = (_normal(problem.cache_shape, DTYPES[problem.dtype], device, seed, tensor, rank) for tensor in (4, 5))
    lengths = _lengths(problem, seed, rank)
    tables = [_draw_table(problem, seed, rank, lengths)] if problem.page else []
    return k, v, *(tensor.to(device) for tensor in (lengths, *tables))


def _draw_table(problem: FlashDecode, seed: int, rank: int, lengths: Tensor) -> Tensor:
    """All pages in random order, int32 [batch, pages]; beyond a sequence's length numbers of no page."""
    generator = torch.Generator().manual_seed(seed * 131 + rank + 7)
    table = torch.randperm(problem.batch * problem.pages, generator=generator).to(torch.int32).view(problem.batch, -1)
    beyond = torch.arange(problem.pages) * problem.page >= lengths[:, None]
    return table.masked_fill_(beyond, 2**31 - 1)


def _contiguous(pool: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """The pages of each sequence [pages, page, kv_heads, head_dim] as [batch, kv_heads, tokens, head_dim]."""
    batch, pages = table.shape
    beyond = torch.arange(pages, device=pool.device) * pool.shape[1] >= lengths[:, None]
    mine = pool[table.masked_fill(beyond, 0).long()]  # [batch, pages, page, kv_heads, head_dim]
    return mine.permute(0, 3, 1, 2, 4).reshape(batch, pool.shape[2], pages * pool.shape[1], pool.shape[3])


def make_inputs(problem: Problem, seed: int, rank: int, device: torch.device) -> Inputs:
    """The inputs of `rank` for a seed, and room for its output."""
    if isinstance(problem, AllGatherGemm):
        a, b = _draw_a(problem, seed, rank, device), _draw_b(problem, seed, rank, device)
        return Inputs((a, b), torch.empty(problem.m, problem.n, dtype=a.dtype, device=device))
    assert isinstance(problem, FlashDecode)
    q = _draw_query(problem, seed, device)
    out = torch.empty(problem.batch, problem.out_heads, problem.head_dim, dtype=q.dtype, device=device)
    return Inputs((q, *_draw_cache(problem, seed, rank, device)), out)


def reference(problem: Problem, seed: int, rank: int, device: torch.device) -> Tensor:
    """The right output of `rank` for a seed, float32."""
    if isinstance(problem, AllGatherGemm):
        shards = [_draw_a(problem, seed, source, device).float() for source in range(problem.world_size)]
        whole = torch.cat(shards, dim=0 if problem.shard == "m" else 1)[: problem.m]
        return whole @ _draw_b(problem, seed, rank, device).float().t()
    assert isinstance(problem, FlashDecode)
    whole = _attention(problem, seed, device)
    first = rank * problem.out_heads if problem.output == "head_scatter" else 0
    return whole[:, first : first + problem.out_heads]


def _attention(problem: FlashDecode, seed: int, device: torch.device) -> Tensor:
    """Softmax attention, one rank's shard at a time, the shards weighed by their log-sum-exp."""
    batch, heads, group, dim = problem.batch, problem.kv_heads, problem.group, problem.head_dim
    q = _draw_query(problem, seed, device).float().view(batch, heads, group, dim)
    outs, sums = [], []
    for source in range(problem.world_size):
        k, v, lengths, *table = _draw_cache(problem, seed, source, device)
        if table:
            k, v = (_contiguous(pool, lengths, *table) for pool in (k, v))
        scores = q @ k.float().transpose(-1, -2) / math.sqrt(dim)
        beyond = torch.arange(k.shape[2], device=device) >= lengths[:, None]
        scores.masked_fill_(beyond[:, None, None, :], -math.inf)
        sums.append(torch.logsumexp(scores, dim=-1))
        outs.append(torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v.float())
    weights = torch.softmax(torch.stack(sums), dim=0).nan_to_num(0.0)
    return (weights[..., None] * torch.stack(outs)).sum(0).view(batch, problem.q_heads, dim)


def relative_error(out: Tensor, right: Tensor) -> float:
    """How far an output is from its reference (see `distance`). Waits for the device."""
    return float(distance(out, right).item())


def distance(out: Tensor, right: Tensor) -> Tensor:
    """Relative error of an output: a float32 scalar on its device, infinite when an element is not finite.

    The greater of ||out - right|| / ||right||, which all elements share, and an eighth of the greatest
    |out - right| / (|right| + rms(right)), which a single wrong element cannot hide from. Rounding keeps both below
    TOLERANCE. A reference of all zeros asks for zeros.
    """
    tiny = torch.finfo(torch.float32).tiny
    difference = (out.float() - right).abs_()
    size = right.norm()
    whole = difference.norm() / size.clamp_min(tiny)
    single = difference.div_((right.abs() + size / math.sqrt(right.numel())).clamp_min_(tiny)).amax() / 8
    return torch.maximum(whole, single).nan_to_num(nan=math.inf, posinf=math.inf)
