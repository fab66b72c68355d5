"""bsp: the bulk-synchronous baseline, as in serving engines: pack, the library's all-to-all or all-gather, merge.

One buffer carries O and LSE unchanged: per row, `head_dim` elements of the problem's type and a float32. With output
`head_scatter` the collective is an all-to-all, or an all-gather after which each rank merges only the heads that it owns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.context import Context
from autotax.kernels.decode_merge.layout import Held, Layout, MergeKernel, load_partial, store_merged
from autotax.kernels.flash_decode.attention import merge, place, store_partial
from autotax.kernels.gemm_reduce_scatter.bsp import all_reduce, reduce_scatter
from autotax.kernels.kernel import VECTOR_BYTES, Kernel
from autotax.operators.decode_merge import DecodeMerge


@triton.jit(do_not_specialize=["lse", "lens", "starts", "sequences", "rows", "lse_token", "lse_head", "arriving", "part"])
def pack_kernel(
    o, lse, lens, starts, sequences, rows, heads, lse_token, lse_head, parts_o, parts_lse, arriving, part,
    SHARE: tl.constexpr, BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,  # noqa: ARG001 - every launch gives it
):  # fmt: skip
    """Copies GROUP rows to the part of their owner. A part has `part` vectors of 16 bytes: first O, then LSE."""
    first = tl.program_id(0) * GROUP
    mine, sums = load_partial(o, lse, lens, starts, sequences, first, rows, heads, lse_token, lse_head, BASE_E, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    if SHARE > 0:
        first = place(first, rows, heads, SHARE)
    before = (first // arriving).to(tl.int64) * part
    at = first % arriving + tl.arange(0, BLOCK_G)
    elements: tl.constexpr = 128 // parts_o.dtype.element_ty.primitive_bitwidth
    store_partial(mine, sums, parts_o + before * elements, parts_lse + before * 4, at, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit(do_not_specialize=["between"])
def merge_kernel(
    parts_o, parts_lse, out, out_lse, between,
    WORLD: tl.constexpr, BASE_E: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Merges GROUP rows of all ranks; the results of two ranks are `between` vectors of 16 bytes apart."""
    first = tl.program_id(0) * GROUP
    elements: tl.constexpr = 128 // parts_o.dtype.element_ty.primitive_bitwidth
    merged, sums = merge(
        parts_o, parts_lse, first, tl.cast(between, tl.int64) * elements, tl.cast(between, tl.int64) * 4,
        WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    store_merged(merged, sums, out, out_lse, first, True, BASE_E, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET)


class Bsp(MergeKernel):
    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.owners = problem.world_size if self.layout.share else 1
        self.to_all = config["collective"] == "all_gather"
        lse_at, part = _part(problem, self.layout)
        self.sent = context.empty((self.owners, part), torch.uint8)
        self.received = context.empty((problem.world_size, self.owners if self.to_all else 1, part), torch.uint8)
        self.lse_at = lse_at

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor, held: Held | None = None) -> None:
        problem, context, layout = self.problem, self.context, self.layout
        parts_o, parts_lse = self._views(self.sent, o.dtype)
        context.launch(
            pack_kernel, (layout.rows // layout.together,),
            *self.own(o, lse, held), parts_o, parts_lse, layout.arriving, self.sent.shape[-1] // VECTOR_BYTES,
            SHARE=layout.share, **layout.block, **self.how,
        )  # fmt: skip
        (context.all_gather if self.to_all else context.all_to_all)(self.received, self.sent)
        mine = self.received[:, context.rank if self.received.shape[1] > 1 else 0]
        from_o, from_lse = self._views(mine, o.dtype)
        context.launch(
            merge_kernel, (layout.arriving // layout.together,),
            from_o, from_lse, out, merged, self.received.stride(0) // VECTOR_BYTES,
            WORLD=problem.world_size, **layout.block, **self.how,
        )  # fmt: skip

    def _views(self, parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tensors at the first O and the first LSE of a buffer of parts; kernels use only their addresses."""
        first = parts.view(-1, parts.shape[-1])[0] if parts.is_contiguous() else parts[0]
        return first[: self.lse_at].view(dtype), first[self.lse_at :].view(torch.float32)

    def changes_for(self, smaller: DecodeMerge) -> dict[str, Any]:
        """Any number of tokens: the collective is called with the sizes of the call."""
        layout = Layout.of(smaller, self.config)
        lse_at, part = _part(smaller, layout)
        sent, received = self.sent.view(-1)[: self.owners * part], self.received.view(-1)
        received = received[: self.received.shape[0] * self.received.shape[1] * part]
        return {
            "layout": layout, "lse_at": lse_at, "sent": sent.view(self.owners, part),
            "received": received.view(*self.received.shape[:2], part),
        }  # fmt: skip


def _part(problem: DecodeMerge, layout: Layout) -> tuple[int, int]:
    """Bytes of the O that one rank sends to an owner, and of O with LSE; both are multiples of a vector."""
    o, lse = layout.arriving * problem.head_dim * problem.item_size, layout.arriving * 4
    before = ceil_div(o, VECTOR_BYTES) * VECTOR_BYTES
    return before, before + ceil_div(lse, VECTOR_BYTES) * VECTOR_BYTES


class GatherAndReduce(Kernel[DecodeMerge]):
    """The other way of serving engines: all-gather of the log-sum-exps, O times its weight, reduce-scatter or all-reduce."""

    def __init__(self, problem: DecodeMerge, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.sums = context.empty((problem.world_size, problem.batch, problem.heads), torch.float32)
        self.received = context.empty((problem.out_heads, problem.batch, problem.head_dim), torch.float32)
        self.to_e = math.log(2.0) if problem.base == "2" else 1.0

    def __call__(self, o: Tensor, lse: Tensor, merged: Tensor, out: Tensor) -> None:
        problem, context = self.problem, self.context
        if context.dry:
            return
        context.all_gather(self.sums, lse)
        natural = torch.where(self.sums.isfinite(), self.sums * self.to_e, -math.inf)
        whole = torch.logsumexp(natural, 0)
        share = torch.exp(natural[context.rank] - whole).nan_to_num_(0.0)[..., None]
        # Moves heads to the front, so that the heads of each rank are contiguous.
        weighed = torch.where(share > 0, share * o, 0.0).transpose(0, 1).contiguous()
        first = 0
        if problem.output == "head_scatter":
            first = context.rank * problem.out_heads
            reduce_scatter(context, self.received, weighed)
            weighed = self.received
        else:
            all_reduce(context, weighed)
        out.copy_(weighed.transpose(0, 1))
        merged.copy_(whole[:, first : first + problem.out_heads] / self.to_e)
