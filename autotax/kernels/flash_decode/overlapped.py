"""overlapped: `resident` with three round trips less. Its phases, words and waits are the same, and so is why it is safe.

- Its launch begins while the kernel before it ends (a programmatic dependent launch): programs take their places, then wait
  until that kernel is done and its writes are there. Nothing is read or written before.
- Log-sum-exps are polled together with the results they belong to, not before them, and what the phases must know of the
  heap and of their own limits is loaded when the kernel begins (see `together`).
- No program counts those that have left the call. Each has an epoch of its own, which it advances at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from autotax.config import Config
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.attention import attend, place, places, work_of
from autotax.kernels.flash_decode.inbox import Inbox
from autotax.kernels.flash_decode.shapes import Shapes, inputs_of
from autotax.kernels.flash_decode.together import distances, merge_part, push_part, store_part
from autotax.kernels.flash_decode.words import store_words
from autotax.kernels.operator import Operator
from autotax.kernels.primitives import LIMIT
from autotax.problem import FlashDecode, power_of_two

WORDS_A_WARP = 1024
"""Words that a program polls at once: 32 a thread."""


@triton.jit(do_not_specialize=["rank"])
def overlapped_kernel(
    q, k, v, lengths, table, out, split_o, split_lse, inbox_o, inbox_lse, bases, control, epochs,
    rank, items, kv_heads, rows, arriving, shard_len, scale,
    WORLD: tl.constexpr, PAYLOAD: tl.constexpr, CHUNK: tl.constexpr, SPLIT_CHUNK: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, SHARE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    DIRECT: tl.constexpr = SPLITS == 1 and SHARE % GROUP == 0
    if TARGET == "cuda":
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    limit = tl.load(control + LIMIT)
    away = distances(bases, rank, WORLD)
    for work in tl.range(program, items * SPLITS, programs, num_stages=1):
        item, split = work_of(tl.cast(work, tl.int32), items, SPLITS, SPLIT_FIRST, CHIPLETS)
        o, lse = attend(
            q, k, v, lengths, table, item, split, kv_heads, shard_len, scale,
            GROUP, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, PAGE, TARGET,
        )  # fmt: skip
        if DIRECT:
            first = item * GROUP
            if SHARE > 0:
                first = place(first, rows, kv_heads * GROUP, SHARE)
            push_part(
                o, lse, first, 0, inbox_o, inbox_lse, away, epoch, rank, arriving,
                WORLD, PAYLOAD, SHARE > 0, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, TARGET,
            )  # fmt: skip
        else:
            at = places(split.to(tl.int64) * rows, item, kv_heads, rows, GROUP, BLOCK_G, SHARE)
            store_words(o, lse, split_o, split_lse, at, epoch, tl.float32, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    PART: tl.constexpr = BLOCK_D // PARTS
    if not DIRECT:
        for block in tl.range(program, rows // HEADS * PARTS, programs, num_stages=1):
            first, part = block // PARTS * HEADS, block % PARTS
            merged, merged_lse = merge_part(
                split_o, split_lse, tl.cast(first, tl.int64), part, rows, epoch, rank, control, limit,
                False, tl.float32, SPLITS, SPLIT_CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
            )  # fmt: skip
            push_part(
                merged, merged_lse, first, part, inbox_o, inbox_lse, away, epoch, rank, arriving,
                WORLD, PAYLOAD, SHARE > 0, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
            )  # fmt: skip
    for block in tl.range(program, arriving // HEADS * PARTS, programs, num_stages=1):
        first, part = block // PARTS * HEADS, block % PARTS
        slot = ((epoch & 1) * WORLD).to(tl.int64) * arriving
        result, _ = merge_part(
            inbox_o, inbox_lse, slot + first, part, arriving, epoch, rank, control, limit,
            True, PAYLOAD, WORLD, CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
        )  # fmt: skip
        store_part(result, out, first + tl.arange(0, BLOCK_H), part, HEADS, HEAD_DIM, BLOCK_H, PART)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + program, epoch + 1)


class Overlapped(Operator[FlashDecode]):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.shapes = shapes = Shapes.of(problem, config)
        rows, dim, splits, parts = shapes.rows, problem.head_dim, config["splits"], config["parts"]
        # Zeros are words of call 0, which is none.
        self.split_o = context.empty((splits, rows, dim), torch.int64).zero_()
        self.split_lse = context.empty((splits, rows), torch.int64).zero_()
        self.inbox = Inbox.of(problem, config, context, shapes)
        most = config["per_processor"] * context.processors
        needed = max(shapes.items * splits, rows // shapes.heads * parts)
        self.programs = 1 if context.interpreted else min(most, needed)
        self.epochs = context.empty((self.programs,), torch.int32).fill_(1)
        self.options = {} if context.interpreted else {"launch_cooperative_grid": True, "launch_pdl": True}
        block_h, width = power_of_two(shapes.heads), shapes.attend["BLOCK_D"] // parts
        sent = width // 2 if config["payload"] == "packed" else width
        at_once = WORDS_A_WARP * config["num_warps"] // block_h
        self.merge = {
            "HEADS": shapes.heads,
            "BLOCK_H": block_h,
            "PARTS": parts,
            "SPLIT_CHUNK": max(1, min(power_of_two(splits), at_once // width)),
            "CHUNK": max(1, min(power_of_two(problem.world_size), at_once // sent)),
        }

    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes, inbox = self.problem, self.context, self.shapes, self.inbox
        inputs, out = inputs_of(tensors)
        context.launch(
            overlapped_kernel,
            (self.programs,),
            *inputs, out, self.split_o, self.split_lse, inbox.o, inbox.lse, context.heap.bases, self.control, self.epochs,
            context.rank, shapes.items, problem.kv_heads, shapes.rows, shapes.arriving, problem.shard_len, shapes.scale,
            WORLD=problem.world_size,
            PAYLOAD=inbox.receive["PAYLOAD"],
            **self.merge,
            **shapes.attend,
            **self.options,
        )  # fmt: skip
