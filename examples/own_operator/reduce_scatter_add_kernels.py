"""The kernels of reduce-scatter + add."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from reduce_scatter_add import ReduceScatterAdd
from torch import Tensor

from autotax.kernels.kernel import Kernel, around_the_border
from autotax.kernels.primitives import EPOCH, flag_address, leave, signal, translate, wait


class Bsp(Kernel[ReduceScatterAdd]):
    """The library's all-to-all, then a sum in the order of the ranks."""

    def __init__(self, problem: ReduceScatterAdd, *more: Any) -> None:
        super().__init__(problem, *more)
        shape = problem.world_size, problem.rows, problem.n
        self.received = self.context.empty(shape, self.context.dtype(problem))
        self.total = self.context.empty(shape[1:], torch.float32)

    def __call__(self, x: Tensor, residual: Tensor, out: Tensor) -> None:
        self.context.all_to_all(self.received, x)
        if not self.context.dry:
            torch.sum(self.received, 0, dtype=torch.float32, out=self.total)
            out.copy_(self.total.add_(residual))


@triton.jit(do_not_specialize=["rank"])
def push_kernel(
    x, residual, out, inbox, flags, bases, control, rank, part,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Program p sends its blocks of each part, then waits for program p of each peer. Slots go by the parity of the epoch."""
    epoch, p, programs = tl.load(control + EPOCH), tl.program_id(0), tl.num_programs(0)
    slot = inbox + (epoch & 1) * WORLD * tl.cast(part, tl.int64)
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        there = translate(slot, bases, rank, peer) + rank * tl.cast(part, tl.int64)
        for first in range(p * BLOCK, part, programs * BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(there + at, tl.load(x + peer * tl.cast(part, tl.int64) + at, mask=at < part), mask=at < part)
        signal(flag_address(flags, rank * programs + p, bases, rank, peer), 1, TARGET, "sys")
    for hop in range(1, WORLD):
        source = (rank + hop) % WORLD
        wait(flags + source * programs + p, epoch, source, p, control, TARGET)
    for first in range(p * BLOCK, part, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for source in range(WORLD):  # one order on all ranks
            mine = x + rank * tl.cast(part, tl.int64) + at
            total += tl.load(mine, mask=(at < part) & (source == rank), other=0.0).to(tl.float32)
            sent = slot + source * tl.cast(part, tl.int64) + at
            total += tl.load(sent, mask=(at < part) & (source != rank), other=0.0).to(tl.float32)
        total += tl.load(residual + at, mask=at < part).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < part)
    leave(control, epoch, programs, TARGET)


class Push(Kernel[ReduceScatterAdd]):
    """One kernel: parts go straight into the inboxes of their owners."""

    def __init__(self, problem: ReduceScatterAdd, *more: Any) -> None:
        super().__init__(problem, *more)
        shape = 2 * problem.world_size, problem.rows, problem.n
        self.inbox = self.context.heap.alloc(shape, self.context.dtype(problem))
        self.flags = self.context.flags(problem.world_size * self.config["programs"])

    def changes_for(self, smaller: ReduceScatterAdd) -> dict[str, Any] | None:
        inbox = around_the_border(self.inbox, smaller.world_size * smaller.rows * smaller.n)
        return None if inbox is None else {"inbox": inbox}

    def __call__(self, x: Tensor, residual: Tensor, out: Tensor) -> None:
        self.context.launch(
            push_kernel, (self.config["programs"],),
            x, residual, out, self.inbox, self.flags, self.context.heap.bases, self.control, self.context.rank, out.numel(),
            WORLD=self.problem.world_size, BLOCK=self.config["block"],
        )  # fmt: skip
