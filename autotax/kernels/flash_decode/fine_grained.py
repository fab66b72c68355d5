"""fine_grained: the push of `gather`, without its barrier: the merge over the ranks waits source by source.

Why every wait ends: only programs of the last launch wait. They wait for the pushes of all ranks, and pushing programs do not
wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autotax.kernels.flash_decode.attention import merge, split_kernel, store_rows
from autotax.kernels.flash_decode.bsp import merge_kernel
from autotax.kernels.flash_decode.gather import Gather, push_kernel
from autotax.kernels.primitives import EPOCH, leave, wait


@triton.jit(do_not_specialize=["rank"])
def combine_when_arrived_kernel(
    out, inbox_o, inbox_lse, flags, control, rank, arriving, WORLD: tl.constexpr, SENDERS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    first = tl.program_id(0) * GROUP
    for hop in tl.range(0, WORLD, num_stages=1):
        source = (rank + WORLD - hop) % WORLD
        wait(flags + source, epoch * SENDERS, source, source, control, TARGET)
    slot = (epoch & 1) * WORLD
    o, _ = merge(
        inbox_o + slot.to(tl.int64) * arriving * HEAD_DIM, inbox_lse + slot * arriving, first, arriving * HEAD_DIM, arriving,
        WORLD, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    store_rows(o, out, first + tl.arange(0, BLOCK_G), GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
    leave(control, epoch, tl.num_programs(0), TARGET)


class FineGrained(Gather):
    def __call__(self, *tensors: Tensor) -> None:
        problem, context, shapes, inbox = self.problem, self.context, self.shapes, self.inbox
        inputs, out = self.inputs_of(tensors)
        rows, dim, splits, world = shapes.rows, problem.head_dim, self.config["splits"], problem.world_size
        context.launch(
            split_kernel,
            (shapes.items * splits,),
            *inputs, self.split_o, self.split_lse, shapes.kv_heads, rows, problem.shard_len, shapes.scale,
            **shapes.attend,
        )  # fmt: skip
        merging = (rows // shapes.heads,)
        context.launch(
            merge_kernel, merging, self.split_o, self.split_lse, self.o, self.lse, rows * dim, rows,
            PIECES=splits, **shapes.merge,
        )  # fmt: skip
        context.launch(
            push_kernel, (world * self.config["senders"],),
            self.o, self.lse, inbox.o, inbox.lse, self.flags, context.heap.bases, self.control, context.rank, shapes.arriving,
            WORLD=world, WAIT=False, **shapes.bulk(self.config),
        )  # fmt: skip
        context.launch(
            combine_when_arrived_kernel, (shapes.arriving // shapes.heads,),
            out, inbox.o, inbox.lse, self.flags, self.control, context.rank, shapes.arriving,
            WORLD=world, SENDERS=self.config["senders"], **shapes.merge,
        )  # fmt: skip
