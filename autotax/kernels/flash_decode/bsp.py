"""bsp: the bulk-synchronous baseline. Split kernel, local merge, the collective library's all-gather, merge over the ranks.

With output `head_scatter` an all-to-all takes the place of the all-gather: each rank is sent the rows that it owns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.config import Config
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import merge, split_kernel, store_partial
from autotax.kernels.flash_decode.shapes import Shapes, inputs_of
from autotax.kernels.operator import Operator
from autotax.problem import FlashDecode


@triton.jit
def merge_kernel(
    o, lse, o_out, lse_out, o_stride, lse_stride,
    PIECES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,  # noqa: ARG001 - every launch gives it
):  # fmt: skip
    """One program merges the PIECES partial results of GROUP rows."""
    first = tl.program_id(0) * GROUP
    merged, merged_lse = merge(o, lse, first, o_stride, lse_stride, PIECES, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    store_partial(merged, merged_lse, o_out, lse_out, first + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


@triton.jit
def merge_for_owners_kernel(
    o, lse, parts, rows, arriving, part,
    PIECES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    TARGET: tl.constexpr,  # noqa: ARG001 - every launch gives it
):  # fmt: skip
    """The same, to parts [world, part]: for each rank the results of the `arriving` rows it owns, then their log-sum-exps."""
    first = tl.program_id(0) * GROUP
    merged, merged_lse = merge(o, lse, first, rows * HEAD_DIM, rows, PIECES, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    parts += (first // arriving).to(tl.int64) * part
    at = first % arriving + tl.arange(0, BLOCK_G)
    store_partial(merged, merged_lse, parts, parts + arriving * HEAD_DIM, at, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


class Bsp(Operator[FlashDecode]):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config)
        rows, dim, splits, f32 = shapes.rows, problem.head_dim, config["splits"], torch.float32
        # One buffer for both halves of a rank's result, so that one collective carries it: [rows, dim] and then [rows].
        self.partial = context.empty((problem.world_size if shapes.scatter else 1, shapes.part), f32)
        self.gathered = context.empty((problem.world_size, shapes.part), f32)
        self.o, self.lse = self.partial[0, : rows * dim], self.partial[0, rows * dim :]
        self.all_lse = self.gathered.view(-1)[shapes.arriving * dim :]
        own = splits > 1 or shapes.scatter
        self.split_o = context.empty((splits, rows, dim), f32) if own else self.o
        self.split_lse = context.empty((splits, rows), f32) if own else self.lse
        self.unused_lse = context.empty((shapes.arriving,), f32)

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes = self.problem, self.context, self.shapes
        inputs, out = inputs_of(tensors)
        rows, dim, splits = shapes.rows, problem.head_dim, self.config["splits"]
        context.launch(
            split_kernel,
            (shapes.items * splits,),
            *inputs, self.split_o, self.split_lse, problem.kv_heads, rows, problem.shard_len, shapes.scale,
            **shapes.attend,
        )  # fmt: skip
        merging = (rows // shapes.heads,)
        if shapes.scatter:
            context.launch(
                merge_for_owners_kernel, merging, self.split_o, self.split_lse, self.partial, rows, shapes.arriving, shapes.part,
                PIECES=splits, **shapes.merge,
            )  # fmt: skip
        elif splits > 1:
            context.launch(
                merge_kernel, merging, self.split_o, self.split_lse, self.o, self.lse, rows * dim, rows,
                PIECES=splits, **shapes.merge,
            )  # fmt: skip
        exchange = context.all_to_all if shapes.scatter else context.all_gather
        exchange(self.gathered, self.partial)
        context.launch(
            merge_kernel, (shapes.arriving // shapes.heads,),
            self.gathered, self.all_lse, out, self.unused_lse, shapes.part, shapes.part,
            PIECES=problem.world_size, **shapes.merge,
        )  # fmt: skip
