"""The base of variants with the vendor's attention: parts of it, merged by their log-sum-exps."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import power_of_two
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import store_rows
from autotax.kernels.gather_attention.library import Partial, attend
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.kernel import Kernel
from autotax.operators.gather_attention import GatherAttention, Part

MERGED_ROWS = 32
"""Most rows that a program of the merge handles at a time."""


@triton.jit
def load_part(
    o, lse, row, heads, of_head, of_token, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
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
            made = q[:, first:end], q.new_empty(len(q), q.shape[2], end - first, dtype=torch.float32)
        else:  # in a rehearsal too: the library builds a plan for new shapes
            made = attend(self.library, q[:, first:end], k[:, keys], v[:, keys], causal=part.causal)
        if whole is None:
            return made
        problem, rows = self.problem, (end - first) * self.problem.q_heads
        group = math.gcd(rows, MERGED_ROWS)
        constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": problem.head_dim, "BLOCK_D": max(16, power_of_two(problem.head_dim))}
        self.context.launch(
            merge_part_kernel, (rows // group, len(q)), *whole, *made, first, q.shape[1], end - first, problem.q_heads,
            *whole[1].stride(), *made[1].stride(), **constants, num_warps=4,
        )  # fmt: skip
        return whole
