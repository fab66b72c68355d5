"""fused: the local merge pushes its own result to every rank; the global merge waits per (source, block of heads).

Three kernels: split, merge and push, receive. Only the last waits, and only for the second kernel of its peers, which does not
wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import merge, split_kernel
from autotax.kernels.flash_decode.exchange import distances, push_result, receive_result
from autotax.kernels.flash_decode.shapes import DecodeKernel, Inbox, Shapes
from autotax.kernels.primitives import EPOCH, LIMIT, leave
from autotax.operators.flash_decode import FlashDecode


@triton.jit(do_not_specialize=["rank"])
def merge_push_kernel(
    o, lse, inbox_o, inbox_lse, flags, bases, control, rank, rows, arriving,
    SPLITS: tl.constexpr, WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, SCATTER: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    away = distances(bases, rank, WORLD)
    first = tl.program_id(0) * GROUP
    merged, merged_lse = merge(o, lse, first, rows * HEAD_DIM, rows, SPLITS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    push_result(
        merged, merged_lse, first, inbox_o, inbox_lse, flags, bases, away, epoch, rank, arriving,
        WORLD, LL, PAYLOAD, SCATTER, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def receive_kernel(
    out, inbox_o, inbox_lse, flags, control, rank, arriving,
    WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    limit = tl.load(control + LIMIT)
    first = tl.program_id(0) * GROUP
    receive_result(
        out, first, inbox_o, inbox_lse, flags, control, limit, epoch, rank, arriving,
        WORLD, LL, PAYLOAD, CHUNK, GROUP, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
    )  # fmt: skip
    leave(control, epoch, tl.num_programs(0), TARGET)


class Fused(DecodeKernel):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config, context.target)
        rows, dim, splits, world = shapes.rows, problem.head_dim, config["splits"], problem.world_size
        self.split_o = context.empty((splits, rows, dim), torch.float32)
        self.split_lse = context.empty((splits, rows), torch.float32)
        self.inbox = Inbox.of(problem, config, context, shapes)
        self.flags = context.flags(world * shapes.arriving // shapes.heads)

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes, inbox = self.problem, self.context, self.shapes, self.inbox
        inputs, out = self.inputs_of(tensors)
        rows, splits, world = shapes.rows, self.config["splits"], problem.world_size
        context.launch(
            split_kernel,
            (shapes.items * splits,),
            *inputs, self.split_o, self.split_lse, shapes.kv_heads, rows, problem.shard_len, shapes.scale,
            **shapes.attend,
        )  # fmt: skip
        context.launch(
            merge_push_kernel, (rows // shapes.heads,),
            self.split_o, self.split_lse, inbox.o, inbox.lse, self.flags, context.heap.bases, self.control,
            context.rank, rows, shapes.arriving, SPLITS=splits, WORLD=world, **inbox.push, **shapes.merge,
        )  # fmt: skip
        context.launch(
            receive_kernel, (shapes.arriving // shapes.heads,),
            out, inbox.o, inbox.lse, self.flags, self.control, context.rank, shapes.arriving,
            WORLD=world, **inbox.receive, **shapes.merge,
        )  # fmt: skip
