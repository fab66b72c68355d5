"""The bulk-synchronous operators in plain torch: they work on any machine, in any group, for any size.

`PlainScaled` is the exception: on GPUs a Triton kernel quantises x.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autotax.hardware import detect
from autotax.heap.collectives import all_gather, reduce_scatter
from autotax.heap.world import World, together
from autotax.operators import scaled
from autotax.operators.all_reduce_norm import AllReduceNorm, quantised, scales_of
from autotax.operators.flash_decode import FlashDecode


class PlainLinear:
    """gather(A) @ B.T for up to `rows` rows of A [rows, cols] a rank."""

    def __init__(self, world: World | None, rows: int, weight: Tensor) -> None:
        self.world = world
        if world is not None:
            self.gathered = weight.new_empty(world.size * rows, weight.shape[1])
            # The first collective connects the ranks, and the first product creates a handle. Neither works during graph capture.
            all_gather(self.gathered[: world.size], weight.new_zeros(1, weight.shape[1]), world.data)
            torch.mm(self.gathered[: world.size], weight.t())

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, gathered: Tensor | None = None) -> None:
        """`gathered` [ranks * rows, cols]: where to store the gathered A."""
        if self.world is not None:
            gathered = self.gathered[: len(out)] if gathered is None else gathered
            all_gather(gathered, a, self.world.data)
            a = gathered
        torch.mm(a, b.t(), out=out)


class PlainRowLinear:
    """The sum over the ranks of A @ B.T, or with `turned` A @ B, for up to `rows` rows of A.

    Each rank gets its part of the rows, or with `replicated` all rows.
    """

    def __init__(self, world: World | None, rows: int, weight: Tensor, *, turned: bool, replicated: bool) -> None:
        self.world, self.turned, self.replicated = world, turned, replicated
        k, n = weight.shape if turned else weight.shape[::-1]
        self.partial = weight.new_empty(0 if replicated or world is None else rows, n)
        if world is not None:  # as in PlainLinear
            self(weight.new_zeros(world.size, k), weight, weight.new_empty(world.size if replicated else 1, n))

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        columns = b if self.turned else b.t()
        if self.world is None or self.replicated:
            torch.mm(a, columns, out=out)
            if self.world is not None:
                dist.all_reduce(out, group=self.world.data)
        else:
            partial = self.partial[: len(a)]
            torch.mm(a, columns, out=partial)
            reduce_scatter(out, partial, self.world.data)
        for added in (bias, residual):
            if added is not None:
                out.add_(added)


class PlainScaled:
    """A parallel layer with a weight in e4m3, for any size. On GPUs one kernel quantises.

    - `kind`: all_gather, reduce_scatter or all_reduce. `layout`: of the scales. `quantize`: see ScaledLinear.
    - `x`: like a call's, of any number of rows. `static`: the scale of quantize `static`. `fast`: accumulation with fewer bits.
    - `most`: the greatest magnitude that a scale of quantize `row` follows.

    Torch's operators allocate memory at each call.
    """

    def __init__(
        self, world: World | None, kind: str, layout: str, quantize: str | None, x: Tensor, static: Tensor | None,
        *, fast: bool = False, most: float = math.inf,
    ) -> None:  # fmt: skip
        self.most = most
        self.world, self.kind, self.layout, self.quantize, self.fast = world, kind, layout, quantize, fast
        self.nowhere: Tensor | None = None
        if x.is_cuda and quantize is not None:
            self.nowhere, self.hardware = torch.zeros(2, dtype=torch.int64, device=x.device), detect()
            with together(world, "compile the kernel that quantises") if world else nullcontext():
                for rows in (1, 2, 16):  # Triton compiles other kernels for 1 and for multiples of 16
                    self.quantised(x.new_zeros(rows, x.shape[1]), static)

    def quantised(self, x: Tensor, static: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [rows, k] in e4m3, and its scales. `static` is the scale of quantize `static`."""
        how = self.quantize or ""
        if self.nowhere is None:
            scales = scaled.scales_of(x, how, self.most) if static is None else static
            return scaled.quantised(x, scales, how), scales
        from autotax.kernels.quantising import quantised_by_kernel  # brings Triton

        return quantised_by_kernel(x, static, scaled.SCALES_OF[how], self.nowhere, self.hardware, self.most)

    def __call__(self, x: Tensor, weight: Tensor, *rest: Tensor) -> None:
        """The tensors of a call: x, the weight, the scales of x unless the call makes them, those of the weight, the result."""
        *_, out = rest
        if self.kind == "reduce_scatter" and self.world is not None:
            partial = out.new_empty(len(x), out.shape[1])
            self.product(x, weight, *rest[:-1], partial)
            reduce_scatter(out, partial, self.world.data)
            return
        self.product(x, weight, *rest)
        if self.kind == "all_reduce" and self.world is not None:
            dist.all_reduce(out, group=self.world.data)

    def product(self, x: Tensor, weight: Tensor, *rest: Tensor) -> None:
        """The product, of a row-parallel layer this rank's addend."""
        *of_x, weight_scales, out = rest
        if self.quantize is not None:
            x, scales = self.quantised(x, of_x[0] if of_x else None)
        else:
            (scales,) = of_x
        if self.kind == "all_gather":
            x, scales = self._gathered(x, scales)
        scaled.library_product(x, scales, weight, weight_scales, self.layout, out, fast=self.fast)

    def _gathered(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        if self.world is None:
            return x, scales
        whole = x.new_empty(self.world.size * len(x), x.shape[1])
        all_gather(whole, x, self.world.data)
        if self.layout == "tensor":
            return whole, scales
        received = scales.new_empty(self.world.size, scales.shape[1], len(x))
        all_gather(received, scales.t(), self.world.data)
        return whole, received.transpose(0, 1).reshape(scales.shape[1], -1).t()


class PlainNorm:
    """All-reduce, residual, RMSNorm and quantisation. Torch's operators allocate memory at each call."""

    in_place = True

    def __init__(self, world: World | None, problem: AllReduceNorm, device: torch.device) -> None:
        self.world, self.problem = world, problem
        if world is not None:  # the first collective connects the ranks, which does not work during graph capture
            dist.all_reduce(torch.zeros(1, device=device), group=world.data)

    def __call__(self, x: Tensor, weight: Tensor, new_residual: Tensor, *more: Tensor, eps: float) -> None:
        problem = replace(self.problem, m=len(x))
        *rest, y = more
        total = x.clone()
        if self.world is not None:
            dist.all_reduce(total, group=self.world.data)
        new_residual.copy_(total.float() + rest.pop(0).float() if problem.residual == "added" else total)
        self.alone(new_residual, weight, *rest, y, eps=eps)

    def alone(self, x: Tensor, weight: Tensor, *rest: Tensor, eps: float) -> None:
        """The norm of rows that are sums already."""
        problem, (*scales_if_any, y) = replace(self.problem, m=len(x)), rest
        total = x.float()
        normed = total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + problem.offset)
        normed = normed.to(x.dtype)
        if problem.quant != "none":
            (scales,) = scales_if_any
            if problem.quant != "tensor":
                scales.view(len(x), -1).copy_(scales_of(problem, normed).view(len(x), -1))
            normed = quantised(problem, normed, scales.view(len(x), -1) if problem.quant == "block" else scales.view(-1))
        y.copy_(normed)


def _exchanged(world: World | None, mine: Tensor, scatter: bool) -> Tensor:
    """The tensors [tokens, heads, ...] of all ranks for this rank: all heads, or with `scatter` its own, [ranks, tokens, ...]."""
    if world is None:
        return mine[None]
    ranks, (tokens, heads, *rest) = world.size, mine.shape
    if not scatter:
        gathered = mine.new_empty(ranks, *mine.shape)
        all_gather(gathered, mine.contiguous(), world.data)
        return gathered
    sent = mine.reshape(tokens, ranks, heads // ranks, *rest).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=world.data)
    return received


class PlainDecode:
    """Attention over this rank's tokens, then a merge of the ranks' results. Torch's operators allocate memory at each call.

    `problem` says which tensors calls bring and how much of the result each rank gets.
    """

    def __init__(self, world: World | None, problem: FlashDecode) -> None:
        self.world = world
        self.problem = problem

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *rest: Tensor) -> None:
        problem = self.problem
        *more, out = rest
        remaining = iter(more)
        table = next(remaining) if problem.page else None
        starts = next(remaining) if problem.window else None
        scales = next(remaining) if problem.kv_dtype != "same" else None
        sinks = next(remaining) if problem.sinks == "learned" else None
        lengths = ends[:, -1] if problem.queries > 1 else ends
        if table is not None:
            k, v = (_contiguous(pool, lengths, table) for pool in (k, v))
        if self.world is None and problem.queries == 1 and len(more) == (problem.page > 0):
            _attend(q, k, v, lengths, out)
        else:
            scatter = problem.output == "head_scatter"
            gathered = _exchanged(self.world, _partial(q, k, v, ends, starts, scales), scatter)
            if sinks is not None:  # the sinks of the rows that this rank merges
                rank = self.world.rank if self.world and scatter else 0
                own = out.shape[1]
                sinks = sinks[rank * own : (rank + 1) * own].repeat_interleave(problem.queries)
            _merge(gathered, out, sinks)


def _contiguous(pool: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """The pages [page, kv_heads, head_dim] of each sequence as [batch, kv_heads, tokens, head_dim], zero beyond its length."""
    (batch, pages), page = table.shape, pool.shape[1]
    beyond = torch.arange(pages * page, device=pool.device) >= lengths[:, None]
    table = table.masked_fill(beyond[:, ::page] | (table < 0) | (table >= len(pool)), 0)
    bits = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool  # torch cannot fill tensors of 8-bit floats
    bits = bits if len(bits) else bits.new_zeros(1, *bits.shape[1:])  # a rank may hold no page
    mine = bits[table]  # [batch, pages, page, kv_heads, head_dim]
    # A partly filled page may hold any values after its tokens, and NaN times a weight of zero would be NaN.
    mine.masked_fill_(beyond.view(batch, pages, page, 1, 1), 0)
    return mine.view(pool.dtype).permute(0, 3, 1, 2, 4).reshape(batch, pool.shape[2], -1, pool.shape[3])


def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Attention for a rank that holds all tokens."""
    inside = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    o = scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=inside[:, None, None], enable_gqa=True)
    torch.where((lengths > 0)[:, None, None], o[:, :, 0], o.new_zeros(()), out=out)


def _partial(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, starts: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """float32 [batch, rows, head_dim + 1]: the attention over the tokens of this rank, and the log-sum-exp of their scores.

    Rows are heads, or heads and query tokens.
    """
    batch, kv_heads, tokens, dim = k.shape
    queries = ends.shape[1] if ends.dim() > 1 else 1
    token = torch.arange(tokens, device=k.device)
    seen = token < ends.view(batch, queries, 1)
    if starts is not None:
        seen &= token >= starts.view(batch, queries, 1)
    # Tokens that no query sees may hold any value, and NaN times a weight of zero would be NaN.
    keys, values = (tensor.float().masked_fill(~seen.any(1)[:, None, :, None], 0.0) for tensor in (k, v))
    if scales is not None:
        keys, values = keys * scales[0, :, None, None], values * scales[1, :, None, None]
    scores = q.float().view(batch, kv_heads, -1, dim) @ keys.transpose(-1, -2) / math.sqrt(dim)
    by_query = scores.view(batch, kv_heads, -1, queries, tokens)
    scores = by_query.masked_fill(~seen[:, None, None], -math.inf).view(scores.shape)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse))
    return torch.cat((weights @ values, lse), dim=-1).view(batch, -1, dim + 1)


def _merge(gathered: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
    """out = the ranks' results [world, batch, rows, head_dim + 1], weighted by log-sum-exps. `sinks` add to the denominator."""
    o, lse = gathered[..., :-1], gathered[..., -1:]
    top = lse.amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks[:, None])
    base = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(lse - base)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None] - base)
    merged = (weights * o).sum(0) / total.clamp_min(torch.finfo(torch.float32).tiny)
    out.copy_(merged.view(out.shape))


# The merge of partial results in plain torch, without Triton: works on any machine, in any group, for any size.

class PlainMerge:
    """The collective library's all-gather, or with `scatter` its all-to-all, then torch's operators, which allocate memory."""

    def __init__(self, world: World | None, *, scatter: bool = False, base: str = "e") -> None:
        self.world = world
        self.scatter = scatter
        self.to_e = math.log(2.0) if base == "2" else 1.0

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor, held: tuple[Tensor, Tensor] | None = None) -> None:
        """O [tokens, heads, head_dim] and LSE [tokens, heads] of this rank; see autotax.nn.DecodeMerge."""
        if held is not None:
            lse = without_empty_shards(lse, *held)
        o = o.view(-1, *o.shape[-2:])
        outs, sums = (_exchanged(self.world, part, self.scatter) for part in (o, lse))
        sums = torch.where(sums.isfinite(), sums * self.to_e, -math.inf)
        top = sums.amax(0)
        weights = torch.exp(sums - torch.where(top == -math.inf, 0.0, top))
        total = weights.sum(0)
        shares = (weights / total.clamp_min(torch.finfo(torch.float32).tiny))[..., None]
        parts = torch.where(shares > 0, shares * outs.float(), 0.0)
        out.view(-1, *out.shape[-2:]).copy_(parts.sum(0))
        merged.view(-1, merged.shape[-1]).copy_((total.log() + top) / self.to_e)

def without_empty_shards(lse: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
    """LSE [tokens, heads] with -inf for tokens of sequences without keys on this rank, and for tokens after the last sequence."""
    tokens = torch.arange(len(lse), device=lse.device, dtype=query_start_loc.dtype)
    sequence = torch.bucketize(tokens, query_start_loc[1:], right=True).clamp_max_(len(seq_lens) - 1)
    empty = (tokens >= query_start_loc[-1]) | (seq_lens[sequence] == 0)
    return torch.where(empty[:, None], -math.inf, lse)
