"""bsp: the bulk-synchronous baseline. Split kernel, local merge, the collective library's all-gather, merge over the ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.config import Config
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import merge, split_kernel, store_partial
from autotax.kernels.flash_decode.shapes import Shapes
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
    store_partial(merged, merged_lse, o_out, lse_out, first, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)


class Bsp(Operator[FlashDecode]):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config)
        rows, dim, splits, f32 = shapes.rows, problem.head_dim, config["splits"], torch.float32
        # One buffer for both halves of a rank's result, so that one all-gather carries it: [rows, dim] and then [rows].
        self.partial = context.empty((rows * (dim + 1),), f32)
        self.gathered = context.empty((problem.world_size, rows * (dim + 1)), f32)
        self.o, self.lse = self.partial[: rows * dim], self.partial[rows * dim :]
        self.all_lse = self.gathered.view(-1)[rows * dim :]
        self.split_o = context.empty((splits, rows, dim), f32) if splits > 1 else self.o
        self.split_lse = context.empty((splits, rows), f32) if splits > 1 else self.lse
        self.unused_lse = context.empty((rows,), f32)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor) -> None:
        problem, context, shapes = self.problem, self.context, self.shapes
        rows, dim, splits = shapes.rows, problem.head_dim, self.config["splits"]
        context.launch(
            split_kernel,
            (shapes.items * splits,),
            q, k, v, lengths, self.split_o, self.split_lse, problem.kv_heads, rows, problem.shard_len, shapes.scale,
            **shapes.attend,
        )  # fmt: skip
        merging = (rows // shapes.heads,)
        if splits > 1:
            context.launch(
                merge_kernel, merging, self.split_o, self.split_lse, self.o, self.lse, rows * dim, rows,
                PIECES=splits, **shapes.merge,
            )  # fmt: skip
        context.all_gather(self.gathered, self.partial)
        stride = rows * (dim + 1)
        context.launch(
            merge_kernel, merging, self.gathered, self.all_lse, out, self.unused_lse, stride, stride,
            PIECES=problem.world_size, **shapes.merge,
        )  # fmt: skip
