"""`push_whole`: a variant of All-Gather + GEMM. One kernel gathers A, then the vendor's library multiplies.

    autotax tune all-gather-gemm --m 512 --n 7168 --k 8192 --load examples/own_variant/push_whole.py
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

import autotax.operators as op
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, flag_address, leave, signal, translate, wait
from autotax.operators.all_gather_gemm import AllGatherGemm


@triton.jit(do_not_specialize=["rank"])
def gather_kernel(
    a, gathered, inbox, flags, bases, control, rank, size,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Program p sends its blocks of the shard, waits for program p of each peer, and copies what came out of the slot."""
    epoch, p, programs = tl.load(control + EPOCH), tl.program_id(0), tl.num_programs(0)
    size = tl.cast(size, tl.int64)
    slot = inbox + (epoch & 1) * WORLD * size
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        there = translate(slot, bases, rank, peer) + rank * size
        for first in range(p * BLOCK, size, programs * BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(there + at, tl.load(a + at, mask=at < size), mask=at < size)
        signal(flag_address(flags, rank * programs + p, bases, rank, peer), 1, TARGET, "sys")
    for hop in range(WORLD):
        source = (rank + hop) % WORLD
        if hop > 0:
            wait(flags + source * programs + p, epoch, source, p, control, TARGET)
        for first in range(p * BLOCK, size, programs * BLOCK):
            at = first + tl.arange(0, BLOCK)
            if hop == 0:  # noqa: SIM108 - pointers of two tensors in one load are more than the compiler for AMD takes
                came = tl.load(a + at, mask=at < size)
            else:
                came = tl.load(slot + source * size + at, mask=at < size)
            tl.store(gathered + source * size + at, came, mask=at < size)
    leave(control, epoch, programs, TARGET)


class PushWhole(Kernel[AllGatherGemm]):
    def __init__(self, problem: AllGatherGemm, *more: Any) -> None:
        super().__init__(problem, *more)
        world, dtype = problem.world_size, self.context.dtype(problem)
        self.gathered = self.context.empty((world * problem.shard_rows, problem.k), dtype)
        self.inbox = self.context.heap.alloc((2 * world, problem.shard_rows, problem.k), dtype)
        self.flags = self.context.flags(world * self.config["programs"])

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.context.launch(
            gather_kernel, (self.config["programs"],),
            a, self.gathered, self.inbox, self.flags, self.context.heap.bases, self.control, self.context.rank, a.numel(),
            WORLD=self.problem.world_size, BLOCK=2048,
        )  # fmt: skip
        self.context.matmul(self.gathered[: self.problem.m], b, out)


def space(problem: AllGatherGemm, hardware: Any) -> op.VariantSpace | None:
    if problem.shard != "m":
        return None
    programs = tuple(p for p in (2, 8, 32, 64) if p <= hardware.processors)
    return op.VariantSpace("push_whole", {"programs": programs}, (), (op.Config.of("push_whole", programs=programs[-1]),))


op.named(AllGatherGemm.op).variant("push_whole", PushWhole, space)
